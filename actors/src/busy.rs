//! Busy ranks: one that evaluates or saves says so, and those who wait for it warn instead of failing (rule F1).
//!
//! A rank declares itself with [`Control::busy`](crate::control::Control::busy); the declaration is on its board until the
//! [`Busy`] is dropped. The watch of every other rank looks at it: it suspends the deadline of collectives up to the
//! declared limit, not that of silence, since heartbeats come from a thread that is not busy.

use std::sync::Arc;
use std::time::Duration;

use gatherflow_kernels::clock;

use crate::control::Control;

/// How often a rank warns that it waits for a busy one, by default.
pub const WARNING: Duration = Duration::from_mins(1);

/// One declaration. Times are in nanoseconds of [`gatherflow_kernels::clock`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spell {
    /// What the rank is doing.
    pub reason: String,
    /// Since when.
    pub since_ns: u64,
    /// Those who wait for it fail after this.
    pub until_ns: u64,
}

/// This rank is busy until this is dropped.
#[derive(Debug)]
#[must_use = "the rank is busy only until this is dropped"]
pub struct Busy {
    control: Control,
    spell: Arc<Spell>,
}

impl Busy {
    pub(crate) fn new(control: Control, reason: String, limit: Duration) -> Self {
        let since_ns = clock::now_ns();
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        let spell = Arc::new(Spell { reason, since_ns, until_ns: since_ns.saturating_add(limit_ns) });
        tracing::info!(
            target: "gatherflow::supervisor", rank = control.rank(), reason = %spell.reason, ?limit, "busy"
        );
        control.board().begin_spell(&spell);
        Self { control, spell }
    }
}

impl Drop for Busy {
    /// Deadlines of those who wait are counted anew from here.
    fn drop(&mut self) {
        self.control.board().end_spell(&self.spell, clock::now_ns());
    }
}

/// When to warn of the ranks waited for.
#[derive(Debug)]
pub(crate) struct Warnings {
    every: Duration,
    /// By rank: the last warning.
    last_ns: Vec<u64>,
}

impl Warnings {
    pub(crate) fn new(ranks: usize, every: Duration) -> Self {
        Self { every, last_ns: vec![0; ranks] }
    }

    /// Whether a warning of `rank` is due, which this rank has waited for since `since_ns`. It counts as given.
    pub(crate) fn take_due(&mut self, rank: usize, since_ns: u64, now_ns: u64) -> bool {
        let last_ns = &mut self.last_ns[rank];
        let due = u128::from(now_ns.saturating_sub(since_ns.max(*last_ns))) >= self.every.as_nanos();
        if due {
            *last_ns = now_ns;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::control::Ranks;

    #[test]
    fn a_rank_is_busy_until_its_last_declaration_is_dropped() {
        let seats = Ranks::local(2, None).unwrap();
        let control = seats[1].control();
        let seen = || seats[0].control().boards()[1].spell().map(|spell| spell.reason.clone());
        assert_eq!(seen(), None);
        let long = control.busy("saves", Duration::from_secs(100));
        let short = control.busy("evaluates", Duration::from_secs(1));
        assert_eq!(seen().as_deref(), Some("saves"), "the one with the latest limit is told");
        drop(long);
        assert_eq!(seen().as_deref(), Some("evaluates"));
        let before = control.board().progress.load(std::sync::atomic::Ordering::SeqCst);
        drop(short);
        assert_eq!(seen(), None);
        assert!(control.board().progress.load(std::sync::atomic::Ordering::SeqCst) > before, "that is progress");
    }

    #[test]
    fn whoever_was_busy_lately_is_known_until_the_time_has_passed() {
        let seats = Ranks::local(1, None).unwrap();
        let board = seats[0].control();
        let board = board.board();
        let spell = |until_ns| Arc::new(Spell { reason: "saves".into(), since_ns: 0, until_ns });
        assert!(!board.busy_within(50, 1000), "never");
        let (one, other) = (spell(2000), spell(900));
        board.begin_spell(&one);
        board.begin_spell(&other);
        assert!(board.busy_within(50, 1000), "now");
        assert!(board.busy_within(50, 2050) && !board.busy_within(50, 2051), "up to its limit only");
        board.end_spell(&one, 1500);
        assert!(board.busy_within(50, 1550) && !board.busy_within(50, 1551), "counted from its end");
    }

    #[test]
    fn warnings_come_once_in_their_time_for_each_rank() {
        let mut warnings = Warnings::new(2, Duration::from_nanos(60));
        let due = |warnings: &mut Warnings, rank, now| warnings.take_due(rank, 1000, now);
        assert!(!due(&mut warnings, 1, 1059));
        assert!(due(&mut warnings, 1, 1060));
        assert!(!due(&mut warnings, 1, 1061));
        assert!(due(&mut warnings, 0, 1061), "another rank");
        assert!(due(&mut warnings, 1, 1120));
        assert!(!warnings.take_due(1, 5000, 5059), "another wait");
        assert!(warnings.take_due(1, 5000, 5060));
    }
}
