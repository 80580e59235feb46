"""Configuration: typed schema, composition by Hydra, cross-field checks. Free of torch."""
