"""Which server is asked what: by hand."""

from __future__ import annotations

from lit_rl.generation.vllm.engine import Request
from lit_rl.generation.vllm.server_engine import Dealer, ServerTask, capacities_for_rank


def task(number: int, *, prompt: int = 1, completions: int = 1, length: int = 9) -> ServerTask:
    return ServerTask(number, Request([5] * prompt, {"n": completions, "max_tokens": length}), until=0.0)


def given(dealer: Dealer, *tasks: ServerTask) -> list[tuple[int, int]]:
    """Server and number of each task that is given out once these were added."""
    for each in tasks:
        dealer.add(each)
    return [(server, each.number) for server, each in dealer.assign()]


def test_the_server_that_holds_the_fewest_tokens_is_asked_and_of_equals_the_first() -> None:
    dealer = Dealer({0: 99, 1: 99, 2: 99})
    # Tokens held:        10 0 0                    10 31 0                        10 31 25
    long = [task(0, length=9), task(1, length=30), task(2, prompt=5, completions=2, length=10)]
    assert given(dealer, *long, task(3, length=9)) == [(0, 0), (1, 1), (2, 2), (0, 3)]
    assert given(dealer, task(4)) == [(0, 4)], "20 to 31 and 25"
    assert given(dealer, task(5)) == [(2, 5)], "25 is the least now"
    assert dealer.done(0, 0) and dealer.done(0, 3)
    assert given(dealer, task(6)) == [(0, 6)], "what was answered counts no more"


def test_ranks_that_do_not_know_of_each_other_load_all_servers_alike() -> None:
    """Were all to begin at the first server, the last ones would get nothing."""
    for world, servers in ((4, 4), (2, 4), (8, 4)):
        asked = [0] * servers
        for rank in range(world):
            dealer = Dealer(capacities_for_rank(rank, world, range(servers), [16] * servers))
            for server, _ in given(dealer, task(0), task(1)):
                asked[server] += 1
        assert asked == [2 * world // servers] * servers
    assert capacities_for_rank(1, 3, [4, 7], [8, 3]) == {4: 3, 7: 1}, (
        "the parts of all ranks together are no less than the room"
    )


def test_what_is_above_the_rooms_waits_for_whoever_is_done_first() -> None:
    dealer = Dealer({0: 3, 1: 2})
    assert given(dealer, *(task(number, completions=2) for number in range(6))) == [(0, 0), (1, 1), (0, 2)]
    assert given(dealer) == []
    assert dealer.done(1, 1) and given(dealer) == [(1, 3)]
    assert dealer.done(1, 3) and given(dealer) == [(1, 4)], "the quick one gets more"
    assert dealer.done(1, 4) and dealer.done(0, 0) and dealer.done(0, 2) and dealer.busy
    assert given(dealer) == [(0, 5)] and dealer.done(0, 5) and not dealer.busy


def test_what_follows_goes_where_its_text_lies_however_loaded() -> None:
    dealer = Dealer({0: 1, 1: 1})
    assert given(dealer, task(0, length=50), task(1, length=5)) == [(0, 0), (1, 1)]
    assert dealer.done(0, 0)
    assert given(dealer, task(2)) == [(0, 2)]
    assert given(dealer, task(0, length=50)) == [(0, 0)], "before others that wait, and above the room"


def test_what_a_lost_server_owes_is_asked_of_the_others_and_its_late_answers_are_not_heard() -> None:
    dealer = Dealer({0: 2, 1: 2})
    assert given(dealer, *map(task, range(5))) == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert dealer.done(0, 0) and given(dealer) == [(0, 4)]
    assert dealer.done(1, 1)
    dealer.add(task(1))  # follows, at home
    dealer.add(task(6))
    assert dealer.drop(1) == 2 and dealer.servers == [0]
    assert not dealer.done(1, 3), "it was given to another"
    assert dealer.done(0, 2) and given(dealer) == [(0, 3)], "what was owed comes before what waits"
    assert dealer.done(0, 3) and dealer.done(0, 4) and given(dealer) == [(0, 1), (0, 6)]
    assert dealer.done(0, 1) and dealer.done(0, 6) and not dealer.busy


def test_a_lost_server_takes_no_next_turn_from_the_others() -> None:
    dealer = Dealer({0: 2, 1: 2, 2: 2})
    assert given(dealer, *map(task, range(3))) == [(0, 0), (1, 1), (2, 2)]
    assert dealer.done(0, 0) and dealer.done(1, 1) and dealer.done(2, 2)
    for number in range(3):
        dealer.add(task(number))  # the next turns
    assert dealer.drop(1) == 1
    assert given(dealer) == [(0, 0), (2, 2), (0, 1)], "the others stay where their text is cached"
