"""How published files describe and name what each model is made of: fields of config.json, names of tensors."""
