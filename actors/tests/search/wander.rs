//! Random orders of models of any size: a seeded scheduler over the same ranks.
//!
//! Some runs choose evenly; the others give each mailbox, executor and path between ranks a weight for the whole run,
//! so that something stays very late all along.

use std::collections::VecDeque;
use std::rc::Rc;

use gatherflow_actors::control::ControlMsg;

use super::rank::Rank;
use super::{Setup, Violation};
use crate::scenario::Draw;

/// One run to its end. Returns how many choices it took.
pub fn wander(setup: Setup, seed: u64) -> Result<usize, Violation> {
    let setup = Rc::new(setup);
    let n = setup.ranks();
    let mut draw = Draw::new(seed);
    let mut ranks: Vec<Rank> = (0..n).map(|me| Rank::new(&setup, me)).collect();
    let mut words: Vec<Vec<VecDeque<ControlMsg>>> = vec![vec![VecDeque::new(); n]; n];
    // Per rank: its mailboxes, its executor, its verdicts, its issuing thread, and what it hears from each peer.
    let mailboxes = ranks[0].mailboxes();
    let even = draw.chance(40);
    let weight = |draw: &mut Draw| if even { 1 } else { [1, 4, 30, 200][draw.below(4)] };
    let weights: Vec<usize> = (0..n * (mailboxes + 3 + n)).map(|_| weight(&mut draw)).collect();
    let per_rank = mailboxes + 3 + n;
    let mut blocked = vec![false; n];
    let mut issued = vec![0; n];
    let mut open = Vec::new();
    for taken in 0.. {
        let signalled = ranks[0].executor.signalled;
        open.clear();
        for me in 0..n {
            let (rank, base) = (&ranks[me], me * per_rank);
            for mailbox in 0..mailboxes {
                if rank.has_mail(mailbox) {
                    open.push(base + mailbox);
                }
            }
            if !blocked[me] && !rank.is_finished() {
                open.push(base + mailboxes);
            }
            if rank.facts.judging.front().is_some_and(|(_, behind)| *behind <= others(&issued, me)) {
                open.push(base + mailboxes + 1);
            }
            if !rank.facts.issuing.is_empty() {
                open.push(base + mailboxes + 2);
            }
            for (from, to) in words.iter().enumerate() {
                if !to[me].is_empty() {
                    open.push(base + mailboxes + 3 + from);
                }
            }
        }
        let total: usize = open.iter().map(|choice| weights[*choice]).sum();
        if total == 0 {
            let stuck = ranks.iter().any(|rank| !rank.is_finished() || !rank.is_quiet());
            if stuck {
                let all: Vec<String> = ranks.iter().map(Rank::describe).collect();
                return Err(Violation::Deadlock(all.join("\n")));
            }
            check_the_end(&ranks)?;
            return Ok(taken);
        }
        let mut left = draw.below(total);
        let chosen = open.iter().find(|choice| {
            let here = left < weights[**choice];
            left = left.saturating_sub(weights[**choice]);
            here
        });
        let Some(chosen) = chosen else { continue };
        let (me, what) = (chosen / per_rank, chosen % per_rank);
        let rank = &mut ranks[me];
        let moved = match what.checked_sub(mailboxes) {
            None => rank.deliver(what).map(|_| true)?,
            Some(0) => rank.execute(others(&issued, me), signalled)?,
            Some(1) => rank.judge(others(&issued, me))?,
            Some(2) => rank.issue_next()?,
            Some(from) => match words[from - 3][me].pop_front() {
                Some(word) => rank.hear(word).map(|()| true)?,
                None => false,
            },
        };
        rank.forget_order();
        issued[me] = rank.facts.issued.len() as u64;
        if moved {
            blocked.fill(false);
        } else {
            blocked[me] = true;
        }
        for (to, word) in std::mem::take(&mut rank.said) {
            (0..n)
                .filter(|r| *r != me && to.is_none_or(|to| to == *r))
                .for_each(|r| words[me][r].push_back(word.clone()));
        }
    }
    Ok(0)
}

/// How many collectives every other rank has issued.
fn others(issued: &[u64], me: usize) -> u64 {
    let mut least = u64::MAX;
    for (rank, count) in issued.iter().enumerate() {
        if rank != me {
            least = least.min(*count);
        }
    }
    least
}

/// Every rank issued what it must, and so all issued the same in the same order.
fn check_the_end(ranks: &[Rank]) -> Result<(), Violation> {
    ranks.iter().try_for_each(Rank::check_the_end)
}
