//! Collectives of some of the ranks.

use super::*;
use crate::members::Members;

fn of(ranks: &[usize], seq: u64, op: CollectiveOp) -> Collective {
    Collective::new(CollectiveKey { group: 1, ..key(seq, 0) }, Members::of(ranks.iter().copied(), 5), op)
}

/// Runs a collective on one range.
fn on_range(transport: &LocalTransport, collective: &Collective, range: &mut [f32]) -> Result<Transfer, CommError> {
    let (start, bytes) = (range.as_mut_ptr(), size_of_val(range));
    let memory = HostMemory { send: start.cast(), send_bytes: bytes, recv: start.cast(), recv_bytes: bytes };
    // SAFETY: the slice is borrowed until the call returns.
    unsafe { transport.run(collective, &memory, crate::clock::now_ns()) }
}

fn all_reduce() -> CollectiveOp {
    CollectiveOp::AllReduce { range: NOWHERE }
}

/// Sums of these depend on their order.
fn rough(rank: usize, i: usize) -> f32 {
    [1e8, 1.0, -1e8, 3.0, 0.1][(rank + i) % 5] * (1.0 + i as f32)
}

#[test]
fn an_all_reduce_leaves_the_sum_in_order_on_every_member() {
    for d in 1..=5 {
        let world = LocalWorld::new(d, None).unwrap();
        // Fewer elements than ranks, and more than chunks.
        for (seq, numel) in [0, 1, 3, 3 * NUMEL + 1].into_iter().enumerate() {
            let results = on_ranks(&world, |transport| {
                let mut range: Vec<f32> = (0..numel).map(|i| rough(transport.rank(), i)).collect();
                on_range(transport, &Collective::of_all(key(seq as u64, 0), all_reduce()), &mut range).unwrap();
                range
            });
            let sum = |i| (1..d).fold(rough(0, i), |sum, peer| sum + rough(peer, i));
            for result in results {
                assert!((0..numel).all(|i| result[i].to_bits() == sum(i).to_bits()), "d={d} numel={numel}");
            }
        }
    }
}

#[test]
fn groups_that_share_no_rank_run_under_one_number_each_in_its_own_order() {
    let world = LocalWorld::new(5, None).unwrap();
    let groups: [&[usize]; 2] = [&[3, 0], &[1, 4, 2]];
    let results = on_ranks(&world, |transport| {
        let rank = transport.rank();
        let group = groups.into_iter().find(|group| group.contains(&rank)).unwrap();
        let slot = group.iter().position(|member| *member == rank).unwrap();
        for round in 0..500 {
            let send: Vec<f32> = (0..group.len()).map(|i| rough(rank, i + round)).collect();
            let mut sum = [f32::NAN];
            apart(transport, &of(group, 4 * round as u64, reduce(DType::F32)), &send, &mut sum).unwrap();
            let own = |peer: usize| rough(peer, slot + round);
            let expected = group[1..].iter().fold(own(group[0]), |sum, peer| sum + own(*peer));
            assert_eq!(sum[0].to_bits(), expected.to_bits());

            let mut all = vec![0_u8; group.len()];
            apart(transport, &of(group, 4 * round as u64 + 1, gather()), &[rank as u8], &mut all).unwrap();
            assert!(all.iter().zip(group).all(|(got, rank)| usize::from(*got) == *rank), "{all:?}");

            let mut range = [rough(rank, round)];
            on_range(transport, &of(group, 4 * round as u64 + 2, all_reduce()), &mut range).unwrap();
            let expected = group[1..].iter().fold(rough(group[0], round), |sum, peer| sum + rough(*peer, round));
            assert_eq!(range[0].to_bits(), expected.to_bits());

            let mut range = [rank as f32];
            on_range(transport, &of(group, 4 * round as u64 + 3, broadcast(1)), &mut range).unwrap();
            assert_eq!(range[0], group[1] as f32, "the root is a slot");
        }
        apart(transport, &Collective::of_all(key(5000, 0), gather()), &[0_u8], &mut [0_u8; 5]).unwrap();
    });
    assert_eq!(results.len(), 5);
    assert!(world.meetings.is_empty(), "a meeting was left open");
}

#[test]
fn groups_that_share_a_rank_disagree_and_all_hear_who_came_with_whom() {
    let world = LocalWorld::new(3, None).unwrap();
    let errors = on_ranks(&world, |transport| {
        let group: &[usize] = if transport.rank() == 2 { &[2, 1] } else { &[0, 1] };
        let mut range = [1.0];
        match transport.rank() {
            // Whoever comes to its own group finds the mismatch, or the others' first.
            1 => on_range(transport, &Collective::of_all(key(0, 0), all_reduce()), &mut range),
            _ => on_range(transport, &of(group, 0, all_reduce()), &mut range),
        }
        .unwrap_err()
        .to_string()
    });
    assert!(errors.iter().all(|e| e.contains("all-reduce of 1 elements of ranks ")), "{errors:?}");
}

#[test]
fn who_is_no_member_and_lists_that_make_no_group_are_refused() {
    let transport = LocalWorld::new(5, None).unwrap().transport(2).unwrap();
    let refused =
        |ranks: &[usize]| on_range(&transport, &of(ranks, 0, all_reduce()), &mut [1.0]).unwrap_err().to_string();
    assert!(refused(&[0, 1]).contains("rank 2 is not one of ranks 0, 1"));
    assert!(
        refused(&[2, 7]).contains("rank 7") && refused(&[2, 2]).contains("twice") && refused(&[]).contains("no ranks")
    );
    let apart = apart(&transport, &Collective::of_all(key(0, 0), all_reduce()), &[0.0_f32], &mut [0.0_f32]);
    assert!(apart.unwrap_err().to_string().contains("in place"));
}

#[test]
fn groups_book_the_links_of_their_members_only() {
    let world = LocalWorld::new(5, Some(SLOW)).unwrap();
    let groups: [&[usize]; 2] = [&[0, 1], &[2, 3]];
    let begins = on_ranks(&world, |transport| {
        let mut range = vec![0.0; 4000];
        let Some(group) = groups.into_iter().find(|group| group.contains(&transport.rank())) else { return [0; 2] };
        // 16000 bytes by 2 ranks: 16000 over each link, 16 ms and 1 ms latency.
        [0, 1].map(|seq| on_range(transport, &of(group, seq, all_reduce()), &mut range).unwrap().begin_ns)
    });
    assert!(begins[..4].iter().all(|begins| begins[1] >= begins[0] + 17_000_000), "{begins:?}");
    let apart = begins[0][0].abs_diff(begins[2][0]);
    assert!(apart < 17_000_000, "the groups do not wait for each other: {apart} ns");
}
