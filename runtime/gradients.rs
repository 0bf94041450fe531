//! Who has written which gradient in this step, and when a parameter's gradient is complete.
//!
//! Pure bookkeeping, shared by all passes of a step: it touches no memory and sends nothing. A parameter is **complete**
//! when, in the last microbatch, backward has left each of its units as often as the unit was entered, and no gradient
//! guard of it is alive. Entering a unit costs one atomic; everything about gradients takes the parameter's own lock.
//!
//! It fails, naming nothing but ids, where a call does not fit the state: a second live guard, a write after completion, a
//! unit left more often than entered.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use parking_lot::Mutex;

use crate::actors::{Event, ParamId, Spoiled, UnitId};

/// How one unit was used in the last microbatch of this step.
#[derive(Debug, Default)]
struct Uses {
    entered: AtomicU32,
    begun: AtomicU32,
    left: AtomicU32,
}

#[derive(Debug, Default, PartialEq, Eq, Clone, Copy)]
enum Phase {
    #[default]
    Untouched,
    Writing,
    Written,
}

#[derive(Debug, Default)]
struct Slot {
    phase: Phase,
    complete: bool,
    last_write: Option<Event>,
}

/// Why a gradient cannot be written now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another guard of the same gradient is alive.
    GuardAlive,
    /// Backward has left all units that use it: its bucket has heard so, and may be on its way.
    Complete,
}

/// What is left to do for gradients when `step` is called.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Trainable parameters that nobody wrote.
    pub(crate) unwritten: Vec<ParamId>,
    /// Parameters that were written but are not complete, with the event of their last write.
    pub(crate) unfinished: Vec<(ParamId, Event)>,
}

/// The gradients of one step.
#[derive(Debug)]
pub(crate) struct Gradients {
    slots: Box<[Mutex<Slot>]>,
    units: Box<[Uses]>,
    last_passed: Box<[AtomicBool]>,
    spoiled: Mutex<Option<Spoiled>>,
}

impl Gradients {
    pub(crate) fn new(params: usize, units: usize, chunks: usize) -> Self {
        Self {
            slots: (0..params).map(|_| Mutex::default()).collect(),
            units: (0..units).map(|_| Uses::default()).collect(),
            last_passed: (0..chunks).map(|_| AtomicBool::new(false)).collect(),
            spoiled: Mutex::new(None),
        }
    }

    /// A training pass of this chunk begins. `false` if its last microbatch was passed already.
    pub(crate) fn begin_pass(&self, chunk: usize, last: bool) -> bool {
        if last {
            !self.last_passed[chunk].swap(true, Ordering::SeqCst)
        } else {
            !self.last_passed[chunk].load(Ordering::SeqCst)
        }
    }

    /// The unit was entered in the last microbatch.
    pub(crate) fn entered(&self, unit: UnitId) {
        self.units[unit.index()].entered.fetch_add(1, Ordering::SeqCst);
    }

    /// Backward enters the unit. `false` if it has done so as often as forward did.
    pub(crate) fn backward(&self, unit: UnitId) -> bool {
        let uses = &self.units[unit.index()];
        let room = |begun| (begun < uses.entered.load(Ordering::SeqCst)).then_some(begun + 1);
        uses.begun.fetch_update(Ordering::SeqCst, Ordering::SeqCst, room).is_ok()
    }

    /// Backward has left the unit.
    pub(crate) fn left(&self, unit: UnitId) {
        self.units[unit.index()].left.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether forward has entered the unit more often than backward has left it, in the last microbatch.
    pub(crate) fn is_entered(&self, unit: UnitId) -> bool {
        let uses = &self.units[unit.index()];
        uses.entered.load(Ordering::SeqCst) != uses.left.load(Ordering::SeqCst)
    }

    /// A write begins. `true` if it is the step's first.
    pub(crate) fn begin(&self, param: ParamId) -> Result<bool, Refused> {
        let mut slot = self.slots[param.index()].lock();
        if slot.phase == Phase::Writing {
            return Err(Refused::GuardAlive);
        }
        if slot.complete {
            return Err(Refused::Complete);
        }
        let first = slot.phase == Phase::Untouched;
        slot.phase = Phase::Writing;
        Ok(first)
    }

    /// A write that had begun did not take place.
    pub(crate) fn cancel(&self, param: ParamId, first: bool) {
        self.slots[param.index()].lock().phase = if first { Phase::Untouched } else { Phase::Written };
    }

    /// A write ended; `event` is behind it.
    pub(crate) fn end(&self, param: ParamId, event: Event) {
        let mut slot = self.slots[param.index()].lock();
        slot.phase = Phase::Written;
        slot.last_write = Some(event);
    }

    /// The step cannot be used. The first reason stays.
    pub(crate) fn spoil(&self, reason: Spoiled) {
        self.spoiled.lock().get_or_insert(reason);
    }

    /// Why the step cannot be used, if so.
    pub(crate) fn spoiled(&self) -> Option<Spoiled> {
        *self.spoiled.lock()
    }

    /// The event of the last write if the parameter has just become complete; told once per step.
    pub(crate) fn take_complete(&self, param: ParamId, units: &[UnitId]) -> Option<Event> {
        let mut slot = self.slots[param.index()].lock();
        if slot.phase != Phase::Written || slot.complete {
            return None;
        }
        let mut entered_at_all = false;
        for unit in units {
            let uses = &self.units[unit.index()];
            let entered = uses.entered.load(Ordering::SeqCst);
            entered_at_all |= entered > 0;
            if uses.left.load(Ordering::SeqCst) != entered {
                return None;
            }
        }
        if !entered_at_all {
            return None;
        }
        slot.complete = true;
        slot.last_write.clone()
    }

    /// A parameter whose gradient is written, or being written.
    pub(crate) fn written(&self) -> Option<ParamId> {
        let index = self.slots.iter().position(|slot| slot.lock().phase != Phase::Untouched);
        index.map(ParamId::from_index)
    }

    /// Forgets what was written, so that the next write is the first; and what was abandoned, unless the last microbatch has
    /// begun, after which there is no writing it anew. Refused once a gradient is complete, which its bucket has
    /// heard and does not take back, or while a guard is alive.
    pub(crate) fn forget_writes(&self) -> Result<(), (ParamId, Refused)> {
        for (index, slot) in self.slots.iter().enumerate() {
            let slot = slot.lock();
            if slot.phase == Phase::Writing {
                return Err((ParamId::from_index(index), Refused::GuardAlive));
            }
            if slot.complete {
                return Err((ParamId::from_index(index), Refused::Complete));
            }
        }
        for slot in &self.slots {
            *slot.lock() = Slot::default();
        }
        if !self.last_passed.iter().any(|passed| passed.load(Ordering::SeqCst)) {
            *self.spoiled.lock() = None;
        }
        Ok(())
    }

    /// What `step` still has to see to, of the trainable parameters.
    pub(crate) fn leftovers(&self, trainable: impl Fn(ParamId) -> bool) -> Leftovers {
        let mut leftovers = Leftovers::default();
        for (index, slot) in self.slots.iter().enumerate() {
            let id = ParamId::from_index(index);
            if !trainable(id) {
                continue;
            }
            let slot = slot.lock();
            match &slot.last_write {
                Some(event) if !slot.complete => leftovers.unfinished.push((id, event.clone())),
                Some(_) => {}
                None => leftovers.unwritten.push(id),
            }
        }
        leftovers
    }

    /// A new step begins.
    pub(crate) fn reset(&self) {
        for slot in &self.slots {
            *slot.lock() = Slot::default();
        }
        for uses in &self.units {
            uses.entered.store(0, Ordering::SeqCst);
            uses.begun.store(0, Ordering::SeqCst);
            uses.left.store(0, Ordering::SeqCst);
        }
        for passed in &self.last_passed {
            passed.store(false, Ordering::SeqCst);
        }
        *self.spoiled.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const P: ParamId = ParamId(0);
    const A: UnitId = UnitId(0);
    const B: UnitId = UnitId(1);

    fn write(board: &Gradients) -> bool {
        let first = board.begin(P).unwrap();
        board.end(P, Event::done(7));
        first
    }

    #[test]
    fn a_tied_parameter_is_complete_after_backward_has_left_all_its_units() {
        let board = Gradients::new(1, 2, 1);
        board.entered(A);
        board.entered(B);
        assert!(board.backward(B));
        assert!(write(&board), "the first write of the step overwrites");
        board.left(B);
        assert!(board.take_complete(P, &[A, B]).is_none(), "unit A was not left yet");
        assert!(board.backward(A));
        assert!(!write(&board), "the second write accumulates");
        board.left(A);
        assert_eq!(board.take_complete(P, &[A, B]).unwrap().id(), 7);
        assert!(board.take_complete(P, &[A, B]).is_none(), "told once");
        assert_eq!(board.begin(P), Err(Refused::Complete));
    }

    #[test]
    fn a_unit_entered_three_times_completes_after_the_third_leave() {
        let board = Gradients::new(1, 1, 1);
        for _ in 0..3 {
            board.entered(A);
        }
        for n in 1..=3 {
            assert!(board.backward(A));
            write(&board);
            board.left(A);
            assert_eq!(board.take_complete(P, &[A]).is_some(), n == 3);
        }
        assert!(!board.backward(A), "a fourth backward has no forward");
    }

    #[test]
    fn a_live_guard_keeps_the_parameter_from_completing() {
        let board = Gradients::new(1, 1, 1);
        board.entered(A);
        board.backward(A);
        board.begin(P).unwrap();
        assert_eq!(board.begin(P), Err(Refused::GuardAlive));
        board.left(A);
        assert!(board.take_complete(P, &[A]).is_none());
        board.end(P, Event::done(1));
        assert!(board.take_complete(P, &[A]).is_some());
    }

    #[test]
    fn step_learns_what_nobody_wrote_and_what_is_not_complete() {
        let board = Gradients::new(2, 1, 1);
        write(&board);
        let leftovers = board.leftovers(|_| true);
        assert_eq!(leftovers.unwritten, [ParamId(1)]);
        assert_eq!(leftovers.unfinished.iter().map(|(p, _)| *p).collect::<Vec<_>>(), [P]);
        board.reset();
        assert_eq!(board.leftovers(|p| p == P).unwritten, [P], "frozen parameters are not asked for");
    }

    #[test]
    fn zero_grad_makes_the_next_write_the_first_again_until_a_gradient_is_complete() {
        let board = Gradients::new(1, 1, 1);
        write(&board);
        assert_eq!(board.forget_writes(), Ok(()));
        assert_eq!(board.forget_writes(), Ok(()), "repeatable");
        board.entered(A);
        assert!(write(&board));
        board.backward(A);
        board.left(A);
        board.take_complete(P, &[A]).unwrap();
        assert_eq!(board.forget_writes(), Err((P, Refused::Complete)));
    }
}
