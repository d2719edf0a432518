"""Mistakes that a type checker finds in a user's script, each on the line that says so."""

import hocket

hocket.build(4, p=4, m=8)  # wrong
hocket.build("zb-h1", p="4", m=8)  # wrong
hocket.simulate("zb-h1")  # wrong
makespan = hocket.simulate(hocket.build("zb-h1", p=4, m=8)).makespans  # wrong
hocket.Costs(forward=3)  # wrong
hocket.dumps(hocket.Costs())  # wrong
