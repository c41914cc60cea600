"""Target families, one file each: reading config.json, the parameter table, writing config.json.

No code outside `models/` compares a family's name.
"""
