"""Runs on other people's machines: one small file for SLURM, Kubernetes, SkyPilot or hosts reached by ssh.

`job` is what was asked, `shell` what a node does of it; each cluster has a file that puts the two into its own form.
The file is printed, read and owned by the user: nothing of ours runs or is remembered besides.
"""
