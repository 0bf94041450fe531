//! All message orders of two ranks, breadth first over hashed states.
//!
//! Ranks share nothing but how many collectives each has issued, the words on their way between them, and a signal past the
//! engine. So the state of a run is a pair of ranks' states and two queues of words, and what a rank can do is worked out
//! once per state of that rank and what it sees of the other. States are told apart by 64-bit hashes.
//!
//! Reductions:
//!
//! - A turn that changes only its actor's own state, which nobody else looks at, is taken at once: it commutes with
//!   everything that may come before it. No state that breaks a rule, and no deadlock, is lost by that.
//! - [`Interior::Settled`]: a rank's letters are delivered in the order in which they were posted, as soon as they are there;
//!   only its executor, its verdicts and its peers' words come in any order. The other rank has every order. To that
//!   one a settled rank is a peer whose collectives and words come at any time (the executor and the verdicts may be as
//!   late as they like); only what a peer would issue or say **because** of an unusual order of its own letters is
//!   not met. Searching with either rank settled covers the interior of both. [`Interior::Every`] on both ranks gives up nothing,
//!   and is done where the model is small enough.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use gatherflow_actors::control::ControlMsg;

use super::rank::{Rank, hash_of_debug};
use super::{Setup, Violation};

/// Which orders of a rank's own letters are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interior {
    /// Every order that FIFO mailboxes allow.
    Every,
    /// The order in which they were posted.
    Settled,
}

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

/// Something that may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Choice {
    Deliver(usize),
    Execute,
    Judge,
    Issue,
    Hear,
}

/// A known state of a rank.
struct Known {
    rank: Rank,
    issued: u64,
    signalled: u32,
}

/// Where a choice leads.
#[derive(Clone)]
enum Next {
    To { choice: Choice, id: u32, said: Rc<[ControlMsg]> },
    Broken { choice: Choice, violation: Violation },
}

/// The states of one rank seen so far.
struct Side {
    interior: Interior,
    known: Vec<Known>,
    by_hash: HashMap<u64, u32>,
    /// What can be done in a state whatever the other rank does; the flag says that nothing else need be tried.
    own: HashMap<u32, (Rc<[Next]>, bool)>,
    /// What can be done in a state, by what is seen of the other rank.
    moves: HashMap<(u32, u64, u32), Rc<[Next]>>,
    hears: HashMap<(u32, u32), Next>,
}

impl Side {
    fn new(setup: &Rc<Setup>, me: usize, interior: Interior) -> Self {
        let (by_hash, own, moves, hears) = Default::default();
        let mut side = Self { interior, known: Vec::new(), by_hash, own, moves, hears };
        side.intern(Rank::new(setup, me));
        side
    }

    fn intern(&mut self, mut rank: Rank) -> u32 {
        let hash = rank.fingerprint();
        let (next, known) = (self.known.len() as u32, &mut self.known);
        *self.by_hash.entry(hash).or_insert_with(|| {
            let (issued, signalled) = (rank.facts.issued.len() as u64, rank.executor.signalled);
            known.push(Known { rank, issued, signalled });
            next
        })
    }

    /// Tries a choice on a copy; `None` if it is not open. The flag says whether it commutes with everything.
    fn take(
        &mut self,
        id: u32,
        choice: Choice,
        act: impl FnOnce(&mut Rank) -> Result<(bool, bool), Violation>,
    ) -> Option<(Next, bool)> {
        let mut rank = self.known[id as usize].rank.clone();
        let mut result = act(&mut rank);
        if self.interior == Interior::Settled {
            result = result.and_then(|outcome| rank.settle().map(|()| outcome));
        }
        rank.forget_order();
        match result {
            Err(violation) => Some((Next::Broken { choice, violation }, false)),
            Ok((false, _)) => None,
            Ok((true, silent)) => {
                let said = std::mem::take(&mut rank.said).into_iter().map(|(_, word)| word).collect();
                Some((Next::To { choice, id: self.intern(rank), said }, silent))
            }
        }
    }

    /// Deliveries and the issuing thread.
    fn own(&mut self, id: u32) -> (Rc<[Next]>, bool) {
        if let Some(own) = self.own.get(&id) {
            return own.clone();
        }
        let (mut moves, mut alone) = (Vec::new(), false);
        for mailbox in 0..self.known[id as usize].rank.mailboxes() {
            if !self.known[id as usize].rank.has_mail(mailbox) {
                continue;
            }
            let deliver = |rank: &mut Rank| rank.deliver(mailbox).map(|silent| (true, silent));
            let Some((next, silent)) = self.take(id, Choice::Deliver(mailbox), deliver) else { continue };
            if silent {
                (moves, alone) = (vec![next], true);
                break;
            }
            moves.push(next);
        }
        if !alone {
            let issue = self.take(id, Choice::Issue, |rank| rank.issue_next().map(|done| (done, false)));
            moves.extend(issue.map(|(next, _)| next));
        }
        let own = (Rc::from(moves), alone);
        self.own.insert(id, own.clone());
        own
    }

    fn moves(&mut self, id: u32, others: u64, signalled: u32) -> Rc<[Next]> {
        if let Some(moves) = self.moves.get(&(id, others, signalled)) {
            return moves.clone();
        }
        let (own, alone) = self.own(id);
        if alone {
            return own;
        }
        let rest = [
            self.take(id, Choice::Execute, |rank| rank.execute(others, signalled).map(|done| (done, false))),
            self.take(id, Choice::Judge, |rank| rank.judge(others).map(|done| (done, false))),
        ];
        let moves: Rc<[Next]> = own.iter().cloned().chain(rest.into_iter().flatten().map(|(next, _)| next)).collect();
        self.moves.insert((id, others, signalled), moves.clone());
        moves
    }

    fn hears(&mut self, id: u32, word: u32, message: &ControlMsg) -> Option<Next> {
        if let Some(next) = self.hears.get(&(id, word)) {
            return Some(next.clone());
        }
        let hear = |rank: &mut Rank| rank.hear(message.clone()).map(|()| (true, false));
        let (next, _) = self.take(id, Choice::Hear, hear)?;
        self.hears.insert((id, word), next.clone());
        Some(next)
    }
}

/// The queues of words seen so far.
#[derive(Default)]
struct Queues {
    known: Vec<VecDeque<ControlMsg>>,
    by_hash: HashMap<u64, u32>,
}

impl Queues {
    fn intern(&mut self, queue: VecDeque<ControlMsg>) -> u32 {
        let (next, known) = (self.known.len() as u32, &mut self.known);
        *self.by_hash.entry(hash_of_debug(&queue)).or_insert_with(|| {
            known.push(queue);
            next
        })
    }

    fn without_first(&mut self, id: u32) -> u32 {
        let mut queue = self.known[id as usize].clone();
        queue.pop_front();
        self.intern(queue)
    }

    fn with(&mut self, id: u32, said: &[ControlMsg]) -> u32 {
        if said.is_empty() {
            return id;
        }
        let mut queue = self.known[id as usize].clone();
        queue.extend(said.iter().cloned());
        self.intern(queue)
    }
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
    let mut queues = Queues::default();
    let empty = queues.intern(VecDeque::new());
    let start = State { ranks: [0, 0], words_to: [empty; 2] };
    // The state from which each was first reached, and the choice that led there.
    let mut states = vec![(start, 0_u32, (0_u8, Choice::Execute))];
    let mut seen = std::collections::HashSet::from([start]);
    let mut at = 0;
    let mut violation = None;
    let mut ended = [std::collections::HashSet::new(), std::collections::HashSet::new()];
    'search: while at < states.len() && states.len() < limit {
        let state = states[at].0;
        let mut stuck = true;
        for me in 0..2 {
            let peer = 1 - me;
            let other = &sides[peer].known[state.ranks[peer] as usize];
            let (others, signalled) = (other.issued, if me == 1 { other.signalled } else { 0 });
            let mut moves: Vec<Next> = sides[me].moves(state.ranks[me], others, signalled).to_vec();
            let queue = state.words_to[me];
            if let Some(word) = queues.known[queue as usize].front() {
                let word = (hash_of_debug(word) as u32, word.clone());
                moves.extend(sides[me].hears(state.ranks[me], word.0, &word.1));
            }
            for next in moves {
                stuck = false;
                let (choice, id, said) = match next {
                    Next::To { choice, id, said } => (choice, id, said),
                    Next::Broken { choice, violation: broken } => {
                        violation = Some((broken, at, Some((me, choice))));
                        break 'search;
                    }
                };
                let mut after = state;
                after.ranks[me] = id;
                if choice == Choice::Hear {
                    after.words_to[me] = queues.without_first(queue);
                }
                after.words_to[peer] = queues.with(state.words_to[peer], &said);
                if !seen.insert(after) {
                    continue;
                }
                states.push((after, at as u32, (me as u8, choice)));
                if let Some(differs) = order_differs(&sides, &after) {
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
