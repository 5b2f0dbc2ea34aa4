"""`sqlguard demo`: the main job on a real PostgreSQL, as a story that checks itself."""
