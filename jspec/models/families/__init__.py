"""Target families, one file each: reading config.json, the parameter table, writing config.json."""
