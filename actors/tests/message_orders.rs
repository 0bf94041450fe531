//! Message orders: the machines themselves, their letters delivered in every order that FIFO mailboxes allow.
//!
//! For 2 ranks, 3 buckets and 2 steps of which one is skipped all orders are searched (`search/explore.rs` says what is
//! reduced and why nothing is lost by that); larger models run through random ones. In every order: nobody waits for ever, no
//! version is read before it is there (V2), every bucket has one reduce and one gather per step, and no gather in a
//! skipped one (O1), ranks issue the same in the same order (O2), no gather runs further ahead than credits reach (C1),
//! and no machine hears what its state does not allow (V1). Faults planted between the machines are found, each by the
//! rule that it breaks.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

#[path = "scenario/mod.rs"]
mod scenario;
mod search;

use std::time::{Duration, Instant};

use gatherflow_actors::Overlap;
use scenario::Draw;
use search::executor::Op;
use search::explore::{Interior, explore};
use search::wander::wander;
use search::{Fault, Setup, Violation};

const BOTH: [Interior; 2] = [Interior::Every; 2];
const FIRST: [Interior; 2] = [Interior::Every, Interior::Settled];
const SECOND: [Interior; 2] = [Interior::Settled, Interior::Every];

/// States searched at most; none of the searches here comes near.
const LIMIT: usize = 4_000_000;

fn enter(units: &[usize]) -> Vec<Op> {
    units.iter().map(|unit| Op::Enter(*unit)).collect()
}

/// Forward, backward and `step`.
fn train(forward: &[usize], writes: &[usize]) -> Vec<Op> {
    [enter(forward), writes.iter().map(|p| Op::Write(*p)).collect(), vec![Op::Step]].concat()
}

fn setup(overlap: Overlap, credits: u32, scripts: [Vec<Op>; 2]) -> Setup {
    Setup {
        members: vec![1, 2, 1],
        units: vec![vec![0], vec![1], vec![2]],
        overlap,
        credits,
        overlap_grad_reduce: true,
        steps_in_flight: 2,
        steps: 2,
        skipped: vec![1],
        issue_on_thread: false,
        compare_every: 0,
        scripts: scripts.map(|script| [script, vec![Op::Close]].concat()).into(),
        fault: None,
    }
}

/// Ranks that move differently through one whole step, then through one that uses the first unit only: two buckets are still to
/// be gathered when their next reduce comes, and nobody writes their gradients.
fn sparse(overlap: Overlap, credits: u32) -> Setup {
    let first = [train(&[0, 1, 2], &[2, 1, 1, 0]), train(&[0], &[0])].concat();
    let second = [train(&[0, 2, 1], &[0, 1, 2]), train(&[0], &[])].concat();
    setup(overlap, credits, [first, second])
}

/// Rank 0 evaluates between the steps, while rank 1 waits for the result past the engine.
fn evaluating(overlap: Overlap, credits: u32) -> Setup {
    let first = [train(&[0, 1, 2], &[2, 1, 1, 0]), enter(&[2, 0]), vec![Op::Signal], train(&[], &[])].concat();
    let second = [train(&[0, 1, 2], &[2, 1, 1, 0]), vec![Op::Await(1)], train(&[1], &[1, 1])].concat();
    setup(overlap, credits, [first, second])
}

/// The first step is skipped, the second is called without forward or backward while the verdict of the first is unknown, and
/// what it made is read after it.
fn blind(overlap: Overlap, credits: u32) -> Setup {
    let first = [train(&[0, 1], &[2, 1, 0]), train(&[], &[]), enter(&[0, 1, 2])].concat();
    let second = [train(&[0, 1, 2], &[2, 1, 1, 0]), train(&[], &[]), enter(&[2])].concat();
    Setup { skipped: vec![0], ..setup(overlap, credits, [first, second]) }
}

/// Searches all orders; none may break a rule. Prints how many states there are.
fn search_all(name: &str, setup: &Setup, interiors: &[[Interior; 2]]) {
    for interiors in interiors {
        let from = Instant::now();
        let found = explore(setup.clone(), *interiors, LIMIT);
        println!(
            "{name}, {:?} with {} credits, interiors {interiors:?}: {} states ({:?} of each rank) in {:.1} s",
            setup.overlap,
            setup.credits,
            found.states,
            found.of_a_rank,
            from.elapsed().as_secs_f64()
        );
        assert_eq!(found.violation, None);
        assert!(!found.cut, "the search was cut short");
    }
}

#[test]
fn no_order_breaks_a_rule_without_overlap() {
    search_all("sparse", &sparse(Overlap::None, 1), &[BOTH]);
    search_all("evaluating", &evaluating(Overlap::None, 1), &[BOTH]);
    search_all("blind", &blind(Overlap::None, 1), &[BOTH]);
}

#[test]
fn no_order_breaks_a_rule_in_a_chain() {
    search_all("sparse", &sparse(Overlap::Chain, 1), &[FIRST, SECOND]);
    search_all("evaluating", &evaluating(Overlap::Chain, 1), &[FIRST, SECOND]);
    search_all("blind", &blind(Overlap::Chain, 1), &[FIRST, SECOND]);
}

#[test]
fn no_order_breaks_a_rule_with_one_credit() {
    search_all("sparse", &sparse(Overlap::Window, 1), &[FIRST, SECOND]);
    search_all("evaluating", &evaluating(Overlap::Window, 1), &[FIRST, SECOND]);
    search_all("blind", &blind(Overlap::Window, 1), &[FIRST, SECOND]);
}

#[test]
fn no_order_breaks_a_rule_with_two_credits() {
    search_all("sparse", &sparse(Overlap::Window, 2), &[FIRST, SECOND]);
    search_all("evaluating", &evaluating(Overlap::Window, 2), &[FIRST, SECOND]);
    search_all("blind", &blind(Overlap::Window, 2), &[FIRST, SECOND]);
}

#[test]
fn no_order_breaks_a_rule_where_a_thread_issues_or_reduces_wait_for_step() {
    let late = |setup| Setup { overlap_grad_reduce: false, ..setup };
    let threaded = |setup| Setup { issue_on_thread: true, ..setup };
    let one = |setup| Setup { steps_in_flight: 1, ..setup };
    search_all("late", &late(blind(Overlap::Window, 1)), &[FIRST]);
    search_all("late", &late(evaluating(Overlap::Chain, 1)), &[FIRST]);
    search_all("threaded", &threaded(blind(Overlap::Window, 1)), &[FIRST]);
    search_all("one", &one(blind(Overlap::Window, 2)), &[FIRST]);
}

/// Searches with a fault planted on one rank, and gives the rule that was broken.
fn planted(fault: Fault, on: usize, setup: Setup) -> Violation {
    let found = explore(Setup { fault: Some((fault, on)), ..setup }, FIRST, LIMIT);
    let (violation, path) = found.violation.unwrap_or_else(|| panic!("{fault:?} was not found"));
    println!("{fault:?}: found after {} states, {} choices: {violation:?}", found.states, path.len());
    violation
}

#[test]
fn lost_words_are_found_as_deadlocks() {
    for (fault, on, setup) in [
        (Fault::DrainLost, 0, sparse(Overlap::Window, 1)),
        (Fault::EarlyPeerDemandLost, 1, evaluating(Overlap::Window, 1)),
        (Fault::AnnouncementLost, 0, evaluating(Overlap::Chain, 1)),
        (Fault::VerdictLost, 1, sparse(Overlap::None, 1)),
        (Fault::SkipUnheard, 0, blind(Overlap::Window, 1)),
    ] {
        let violation = planted(fault, on, setup);
        assert!(matches!(violation, Violation::Deadlock(_)), "{fault:?}: {violation:?}");
    }
}

#[test]
fn other_planted_faults_are_found_each_by_the_rule_that_it_breaks() {
    let stale = planted(Fault::ReadyBeforeItsGather, 0, sparse(Overlap::Window, 1));
    assert!(matches!(stale, Violation::StaleRead(_)), "{stale:?}");
    // Only a program that writes without having read comes so early.
    let eager = || [train(&[], &[2, 1, 1, 0]), train(&[], &[0])].concat();
    let early = planted(Fault::FreeBeforeAdam, 0, setup(Overlap::Window, 1, [eager(), eager()]));
    assert!(matches!(early, Violation::EarlyWrite(_)), "{early:?}");
    let order = planted(Fault::GathersSwapped, 1, sparse(Overlap::None, 1));
    assert!(matches!(order, Violation::OrderDiffers(_)), "{order:?}");
    let twice = planted(Fault::ReducedTwice, 0, sparse(Overlap::Chain, 1));
    assert!(matches!(twice, Violation::WrongCount(_)), "{twice:?}");
    let credits = planted(Fault::OneCreditMore, 0, sparse(Overlap::Window, 1));
    assert!(matches!(credits, Violation::CreditsExceeded(_)), "{credits:?}");
    let chain = planted(Fault::ChainRunsAhead, 0, sparse(Overlap::Chain, 1));
    assert!(matches!(chain, Violation::CreditsExceeded(_)), "{chain:?}");
    let refused = planted(Fault::GatheredTwice, 0, sparse(Overlap::Window, 1));
    assert!(matches!(refused, Violation::WrongTransition(_)), "{refused:?}");
}

/// 4 ranks, 8 buckets, 5 steps: orders of units that differ per rank and step, units and gradients left out, evaluations of rank 0
/// alone.
fn draw(seed: u64) -> Setup {
    let mut draw = Draw::new(seed);
    let (ranks, buckets, steps) = (4, 8, 5);
    let units: Vec<Vec<usize>> = (0..6).map(|unit| if unit < 2 { vec![unit, 6 + unit] } else { vec![unit] }).collect();
    let members: Vec<u32> = (0..buckets).map(|_| 1 + draw.below(2) as u32).collect();
    let (leave_out, evaluate) = (draw.chance(40), draw.chance(50));
    let mut scripts = vec![Vec::new(); ranks];
    for step in 0..steps {
        for (rank, script) in scripts.iter_mut().enumerate() {
            let mut order: Vec<usize> = (0..units.len()).collect();
            draw.shuffle(&mut order);
            if leave_out {
                order.truncate(draw.below(units.len() + 1));
            }
            script.extend(enter(&order));
            for position in order.iter().rev().flat_map(|unit| units[*unit].iter().rev()) {
                let written = if leave_out { draw.below(members[*position] as usize + 1) } else { members[*position] as usize };
                script.extend(vec![Op::Write(*position); written]);
            }
            script.push(Op::Step);
            if evaluate && step % 2 == 0 {
                match rank {
                    0 => script.extend([enter(&[draw.below(6), draw.below(6)]), vec![Op::Signal]].concat()),
                    _ => script.push(Op::Await(step as u32 / 2 + 1)),
                }
            }
        }
    }
    scripts.iter_mut().for_each(|script| script.push(Op::Close));
    Setup {
        members,
        units,
        overlap: [Overlap::None, Overlap::Chain, Overlap::Window][draw.below(3)],
        credits: [1, 2, 3, u32::MAX][draw.below(4)],
        overlap_grad_reduce: draw.chance(70),
        steps_in_flight: 1 + draw.below(3) as u64,
        steps,
        skipped: (0..steps).filter(|_| draw.chance(25)).collect(),
        issue_on_thread: draw.chance(50),
        compare_every: draw.below(3) as u64,
        scripts,
        fault: None,
    }
}

#[test]
fn random_orders_of_larger_models_break_no_rule() {
    let (from, mut choices, mut seed) = (Instant::now(), 0, 0);
    while seed < 3000 && from.elapsed() < Duration::from_secs(8) {
        choices += wander(draw(seed), seed).unwrap_or_else(|violation| panic!("seed {seed}: {violation:?}"));
        seed += 1;
    }
    println!("{seed} runs, {choices} choices in {:.1} s", from.elapsed().as_secs_f64());
    assert!(seed >= 100, "only {seed} runs in {:?}", from.elapsed());
}

#[test]
fn random_orders_find_a_lost_drain_too() {
    let lost = |seed| wander(Setup { fault: Some((Fault::DrainLost, 2)), ..draw(seed) }, seed);
    let found = (0..50).filter_map(|seed| lost(seed).err()).next();
    assert!(matches!(found, Some(Violation::Deadlock(_))), "{found:?}");
}
