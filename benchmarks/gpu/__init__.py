"""What ``make gpu`` runs on a machine with a GPU: checks, timings and tests, and their report.

Each stage is a process of its own, and the report is written after each: a kernel that crashes
takes its stage along, and what was measured stays. With ``--device cpu`` the CPU stands in, on tiny
sizes: the whole plan can be tried without a GPU.
"""
