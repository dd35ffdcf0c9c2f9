"""The rendezvous of several machines: which of them train in the present generation, and which are
spare.

`timing` has the time limits, `messages` what is sent, `coordinator` the decisions, `server` and
`link` the two sides of the connection. Torch-free.
"""
