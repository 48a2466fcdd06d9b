"""Bytes in motion: the places where objects lie, without Prefect."""
