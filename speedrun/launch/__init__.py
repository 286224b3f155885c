"""Runs on other people's machines: one small file for SLURM, Kubernetes, SkyPilot or hosts reached by ssh.

`job` holds what was asked, `templates/` the text of the files, `shell` the rendering; each cluster has a module that
fills its template. The user reads and owns the file: nothing else is started or stored.
"""
