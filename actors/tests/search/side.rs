//! What one rank can do, worked out once for each of its states.

use std::collections::HashMap;
use std::rc::Rc;

use super::Setup;
use super::Violation;
use super::rank::Rank;
use super::words::Words;

/// Which orders of a rank's own letters are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interior {
    /// Every order that FIFO mailboxes allow.
    Every,
    /// The order in which they were posted.
    Settled,
}

/// Something that may happen next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    Deliver(usize),
    Execute,
    Judge,
    Issue,
    Hear,
}

/// A known state of a rank.
pub struct Known {
    pub rank: Rank,
    pub issued: u64,
    pub signalled: u32,
}

/// Where a choice leads.
#[derive(Clone)]
pub enum Next {
    /// `said`: words to the peer, by number.
    To {
        choice: Choice,
        id: u32,
        said: Rc<[u32]>,
    },
    Broken {
        choice: Choice,
        violation: Violation,
    },
}

/// The states of one rank seen so far.
pub struct Side {
    interior: Interior,
    pub known: Vec<Known>,
    by_hash: HashMap<u64, u32>,
    /// What can be done in a state whatever the other rank does; the flag says that nothing else need be tried.
    own: HashMap<u32, (Rc<[Next]>, bool)>,
    /// What can be done in a state, by what is seen of the other rank.
    moves: HashMap<(u32, u64, u32), Rc<[Next]>>,
    hears: HashMap<(u32, u32), Next>,
}

impl Side {
    pub fn new(setup: &Rc<Setup>, me: usize, interior: Interior) -> Self {
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
        words: &mut Words,
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
                let said = std::mem::take(&mut rank.said).into_iter().map(|(_, word)| words.number(word)).collect();
                Some((Next::To { choice, id: self.intern(rank), said }, silent))
            }
        }
    }

    /// Deliveries and the issuing thread.
    fn own(&mut self, id: u32, words: &mut Words) -> (Rc<[Next]>, bool) {
        if let Some(own) = self.own.get(&id) {
            return own.clone();
        }
        let (mut moves, mut alone) = (Vec::new(), false);
        for mailbox in 0..self.known[id as usize].rank.mailboxes() {
            if !self.known[id as usize].rank.has_mail(mailbox) {
                continue;
            }
            let deliver = |rank: &mut Rank| rank.deliver(mailbox).map(|silent| (true, silent));
            let Some((next, silent)) = self.take(id, Choice::Deliver(mailbox), words, deliver) else { continue };
            if silent {
                (moves, alone) = (vec![next], true);
                break;
            }
            moves.push(next);
        }
        if !alone {
            let issue = self.take(id, Choice::Issue, words, |rank| rank.issue_next().map(|done| (done, false)));
            moves.extend(issue.map(|(next, _)| next));
        }
        let own = (Rc::from(moves), alone);
        self.own.insert(id, own.clone());
        own
    }

    /// What can be done in a state, but for hearing. `others`: how many collectives the other rank has issued.
    pub fn moves(&mut self, id: u32, others: u64, signalled: u32, words: &mut Words) -> Rc<[Next]> {
        if let Some(moves) = self.moves.get(&(id, others, signalled)) {
            return moves.clone();
        }
        let (own, alone) = self.own(id, words);
        if alone {
            return own;
        }
        let rest = [
            self.take(id, Choice::Execute, words, |rank| rank.execute(others, signalled).map(|done| (done, false))),
            self.take(id, Choice::Judge, words, |rank| rank.judge(others).map(|done| (done, false))),
        ];
        let moves: Rc<[Next]> = own.iter().cloned().chain(rest.into_iter().flatten().map(|(next, _)| next)).collect();
        self.moves.insert((id, others, signalled), moves.clone());
        moves
    }

    /// What hearing a word leads to.
    pub fn hears(&mut self, id: u32, word: u32, words: &mut Words) -> Option<Next> {
        if let Some(next) = self.hears.get(&(id, word)) {
            return Some(next.clone());
        }
        let message = words.word(word).clone();
        let hear = |rank: &mut Rank| rank.hear(message).map(|()| (true, false));
        let (next, _) = self.take(id, Choice::Hear, words, hear)?;
        self.hears.insert((id, word), next.clone());
        Some(next)
    }
}
