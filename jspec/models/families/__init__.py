"""One file a target family: how its config.json reads, its parameter table, its config.json.

`models.registry` lists them. Nothing outside `models/` compares a family's name.
"""
