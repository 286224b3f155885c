# SkyPilot gives the address of each node, and the rank of this one.
run+=(--coordinator "${SKYPILOT_NODE_IPS%%$'\n'*}:@@port" --processes "$SKYPILOT_NUM_NODES")
run+=(--process "$SKYPILOT_NODE_RANK" --meet-within @@meet_s)
