//! Who takes part in a collective: all ranks of the world, or an ordered list of some.
//!
//! Slots (of an all-gather, say) and sums follow that order. Ranks that bring lists which share a rank, but are not the same,
//! under one sequence number disagree (rule O2); lists that share none are collectives of their own, at the same time.

use std::sync::Arc;

/// The ranks of one collective, in the order of their slots. Cheap to clone.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Members(Option<Arc<[usize]>>);

impl Members {
    /// All ranks of the world, in rank order.
    pub const ALL: Self = Self(None);

    /// These ranks of a world of `world`. What names every rank in rank order is [`Members::ALL`].
    pub fn of(ranks: impl IntoIterator<Item = usize>, world: usize) -> Self {
        let ranks: Arc<[usize]> = ranks.into_iter().collect();
        if ranks.iter().copied().eq(0..world) { Self::ALL } else { Self(Some(ranks)) }
    }

    /// How many there are in a world of `world` ranks.
    pub fn count(&self, world: usize) -> usize {
        self.0.as_ref().map_or(world, |ranks| ranks.len())
    }

    /// Their ranks, by slot, in a world of `world` ranks.
    pub fn ranks(&self, world: usize) -> impl Iterator<Item = usize> + '_ {
        let some = self.0.as_deref();
        (0..self.count(world)).map(move |slot| some.map_or(slot, |ranks| ranks[slot]))
    }

    /// The slot of a rank; `None` if it takes no part.
    pub fn slot_of(&self, rank: usize) -> Option<usize> {
        match &self.0 {
            None => Some(rank),
            Some(ranks) => ranks.iter().position(|member| *member == rank),
        }
    }

    /// Whether some rank takes part in both.
    pub fn meet(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(mine), Some(theirs)) => mine.iter().any(|rank| theirs.contains(rank)),
            _ => true,
        }
    }

    /// What is wrong with them in a world of `world` ranks: nobody, a rank that is not there, or one named twice.
    pub(crate) fn flaw(&self, world: usize) -> Option<String> {
        let ranks = self.0.as_deref()?;
        let unknown = ranks.iter().find(|rank| **rank >= world);
        let twice = || ranks.iter().enumerate().find(|(slot, rank)| ranks[..*slot].contains(rank));
        if ranks.is_empty() {
            return Some("a collective of no ranks".into());
        }
        let missing =
            unknown.map(|rank| format!("a collective of {self}, but rank {rank} is not one of {world} ranks"));
        missing.or_else(|| twice().map(|(_, rank)| format!("a collective of {self}, which has rank {rank} twice")))
    }
}

impl std::fmt::Display for Members {
    /// `all ranks`, or `ranks 0, 2`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Some(ranks) = &self.0 else { return f.write_str("all ranks") };
        let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        write!(f, "ranks {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_the_order_of_the_list_and_the_whole_world_is_all() {
        let some = Members::of([3, 1], 4);
        assert_eq!((some.slot_of(3), some.slot_of(1), some.slot_of(0)), (Some(0), Some(1), None));
        assert_eq!((some.count(4), some.ranks(4).collect::<Vec<_>>()), (2, vec![3, 1]));
        assert_eq!((Members::of(0..4, 4), Members::ALL.slot_of(2), Members::ALL.count(4)), (Members::ALL, Some(2), 4));
        assert_ne!(Members::of([1, 0], 2), Members::ALL, "another order is another sum");
        assert!(some.meet(&Members::of([0, 1], 4)) && !some.meet(&Members::of([0, 2], 4)) && some.meet(&Members::ALL));
    }

    #[test]
    fn lists_that_make_no_collective_are_named() {
        let flaw = |ranks: &[usize]| Members::of(ranks.iter().copied(), 3).flaw(3).unwrap_or_default();
        assert_eq!((flaw(&[0, 2]), Members::ALL.flaw(3)), (String::new(), None));
        assert!(flaw(&[]).contains("no ranks") && flaw(&[1, 3]).contains("rank 3") && flaw(&[2, 2]).contains("twice"));
    }
}
