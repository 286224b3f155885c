"""Islands: meshes that train apart and exchange weights every few steps."""
