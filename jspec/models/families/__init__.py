"""Target families, one file each: reading config.json, the parameter table, writing config.json.

`models.registry` lists them. No code outside `models/` compares a family's name.
"""
