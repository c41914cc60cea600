"""Target families, one file each: reading config.json, the parameter table, writing config.json.

Gemma 4's table is in a file of its own, gemma4_params.

No code outside `models/` compares a family's name.
"""
