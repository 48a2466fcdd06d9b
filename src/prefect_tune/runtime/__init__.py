"""The code of trial processes, which do not import Prefect. The main programs are in `processes`."""
