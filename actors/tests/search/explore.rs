//! All message orders of two ranks, breadth first over hashed states.
//!
//! Ranks share nothing but how many collectives each has issued, the words on their way between them, and a signal
//! past the engine. So the state of a run is a pair of ranks' states and two queues of words, and what a rank can do
//! is worked out once per state of that rank and what it sees of the other. States are told apart by 64-bit hashes.
//!
//! Reductions:
//!
//! - A turn that changes only its actor's own state and what that has enqueued, or tells that gradients are free, is
//!   taken at once: it commutes with everything that may come before it. No deadlock and no broken rule is lost.
//! - [`Interior::Settled`]: a rank's letters are delivered in the order in which they were posted, as soon as they are
//!   there; only its executor, its verdicts and its peer's words come in any order. The other rank has every order. To
//!   that one, a settled rank is a peer whose collectives and words come at any time, since its executor and its
//!   verdicts may be as late as they like. What is lost is what a peer does **because** of an unusual order of its own
//!   letters, while this one's are unusual too. Searching with either rank settled covers the interior of both.
//! - [`Interior::Every`] on both ranks loses nothing, and is done where the model is small enough.

use std::collections::HashSet;
use std::rc::Rc;

use super::side::{Choice, Interior, Next, Side};
use super::words::Words;
use super::{Setup, Violation};

/// What a search found.
#[derive(Debug)]
pub struct Found {
    /// States of both ranks together.
    pub states: usize,
    /// Different states of each rank.
    pub of_a_rank: [usize; 2],
    /// The first rule broken, after these choices.
    pub violation: Option<(Violation, Vec<String>)>,
    /// The search ended before it had seen everything.
    pub cut: bool,
}

/// Both ranks, and the words on their way to each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    ranks: [u32; 2],
    words_to: [u32; 2],
}

/// Searches all orders of a setup of two ranks, at most `limit` states.
pub fn explore(setup: Setup, interiors: [Interior; 2], limit: usize) -> Found {
    assert_eq!(setup.ranks(), 2);
    let setup = Rc::new(setup);
    let mut sides = [0, 1].map(|me| Side::new(&setup, me, interiors[me]));
    let mut words = Words::new();
    let start = State { ranks: [0, 0], words_to: [0, 0] };
    // The state from which each was first reached, and the choice that led there.
    let mut states = vec![(start, 0_u32, (0_u8, Choice::Execute))];
    let mut seen = HashSet::from([start]);
    let mut at = 0;
    let mut violation = None;
    let mut ended = [HashSet::new(), HashSet::new()];
    'search: while at < states.len() && states.len() < limit {
        let state = states[at].0;
        let mut stuck = true;
        for me in 0..2 {
            let peer = 1 - me;
            let other = &sides[peer].known[state.ranks[peer] as usize];
            let (others, signalled) = (other.issued, if me == 1 { other.signalled } else { 0 });
            let moves = sides[me].moves(state.ranks[me], others, signalled, &mut words);
            let queue = state.words_to[me];
            let hears = words.first(queue).and_then(|word| sides[me].hears(state.ranks[me], word, &mut words));
            for next in moves.iter().chain(&hears) {
                stuck = false;
                let (choice, id, said) = match next {
                    Next::To { choice, id, said } => (*choice, *id, said),
                    Next::Broken { choice, violation: broken } => {
                        violation = Some((broken.clone(), at, Some((me, *choice))));
                        break 'search;
                    }
                };
                let mut after = state;
                after.ranks[me] = id;
                if choice == Choice::Hear {
                    after.words_to[me] = words.without_first(queue);
                }
                for word in said.iter() {
                    after.words_to[peer] = words.with(after.words_to[peer], *word);
                }
                if !seen.insert(after) {
                    continue;
                }
                states.push((after, at as u32, (me as u8, choice)));
                let known = &sides[me].known;
                if known[id as usize].issued > known[state.ranks[me] as usize].issued
                    && let Some(differs) = order_differs(&sides, &after)
                {
                    violation = Some((differs, states.len() - 1, None));
                    break 'search;
                }
            }
        }
        if stuck {
            for me in 0..2 {
                let rank = &sides[me].known[state.ranks[me] as usize].rank;
                if !rank.is_finished() || !rank.is_quiet() {
                    let both = [0, 1].map(|r: usize| sides[r].known[state.ranks[r] as usize].rank.describe());
                    violation = Some((Violation::Deadlock(both.join("\n")), at, None));
                    break 'search;
                }
                if ended[me].insert(state.ranks[me])
                    && let Err(broken) = rank.check_the_end()
                {
                    violation = Some((broken, at, None));
                    break 'search;
                }
            }
        }
        at += 1;
    }
    let violation = violation.map(|(broken, at, last)| (broken, path(&states, at, last)));
    let cut = violation.is_none() && at < states.len();
    Found { states: states.len(), of_a_rank: [sides[0].known.len(), sides[1].known.len()], violation, cut }
}

/// O1: what both have issued is the same.
fn order_differs(sides: &[Side; 2], state: &State) -> Option<Violation> {
    let of = |me: usize| &sides[me].known[state.ranks[me] as usize].rank.facts.issued;
    let (a, b) = (of(0).iter(), of(1).iter());
    let named = |k: &gatherflow_kernels::CollectiveKey| (k.kind, k.bucket, k.version);
    let (a, b) = a.zip(b).find(|(a, b)| named(a) != named(b))?;
    Some(Violation::OrderDiffers(format!("rank 0 issued {a}, rank 1 issued {b}")))
}

type Reached = (State, u32, (u8, Choice));

fn path(states: &[Reached], mut at: usize, last: Option<(usize, Choice)>) -> Vec<String> {
    let mut path: Vec<String> = last.iter().map(|(rank, choice)| format!("rank {rank}: {choice:?}")).collect();
    while at > 0 {
        let (_, from, (rank, choice)) = states[at];
        path.push(format!("rank {rank}: {choice:?}"));
        at = from as usize;
    }
    path.reverse();
    path
}
