"""Devices, meshes, groups and networks; servers (`rpc`) and redistribution (`redistribute`)."""
