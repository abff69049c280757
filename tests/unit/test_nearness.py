"""Which replicas a Router prefers."""

from __future__ import annotations

from collections import Counter

from deployments.nearness import nearest_first

MEMBERS = {
    "a1": {"node": "a"}, "b1": {"node": "b"}, "b2": {"node": "b"}, "c1": {"node": "c"}, "old": {},
}  # fmt: skip


def test_those_on_the_routers_own_node_come_first():
    for node, near in [("a", {"a1"}), ("b", {"b1", "b2"}), ("head", set())]:
        order = nearest_first(MEMBERS, node, "router")
        assert set(order[: len(near)]) == near
        assert sorted(order) == sorted(MEMBERS)


def test_the_order_is_the_same_whatever_the_order_of_the_news():
    again = dict(reversed(MEMBERS.items()))
    assert nearest_first(MEMBERS, "b", "router") == nearest_first(again, "b", "router")


def test_several_routers_do_not_all_turn_to_the_same_replica():
    members = {f"replica{number}": {"node": "far"} for number in range(4)}
    firsts = Counter(nearest_first(members, "head", f"router{number}")[0] for number in range(400))
    assert all(70 <= count <= 130 for count in firsts.values()), firsts
