"""The drivers' own test suites, directly and through `sqlguard serve --observe`: `python -m scripts.client_suites`."""
