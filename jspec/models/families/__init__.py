"""Target families, one file each: reading config.json, the parameter table, writing config.json.

Gemma 4's table has its own file, gemma4_params. No code outside `models/` compares a family's name.
"""
