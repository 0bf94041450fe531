//! Jobs that are interrupted: the state of all ranks after some steps, and another set of ranks that goes on from it.

use gatherflow::{Internals, Rank, Ranks, State};

use super::{Expected, Job, Setting, Trainer};

impl Job<'_> {
    /// Runs on threads, one per rank, from before its engine starts.
    pub fn on_seats<T: Send>(&self, setting: &Setting, run: impl Fn(Rank) -> T + Sync) -> Vec<T> {
        let run = &run;
        let ranks = Ranks::with_config(self.ranks, &self.config(setting)).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    /// The first steps of the job, and each rank's state right after the last of them, before anything else waits for it; and
    /// the parameters that are read then.
    pub fn parts_after(&self, expected: &Expected, setting: &Setting, steps: u64) -> Vec<(State, Vec<Vec<f32>>)> {
        self.on_seats(setting, |rank| {
            let mut trainer = Trainer::start(rank, self, setting, Internals::default(), expected);
            trainer.train(steps);
            let state = trainer.engine.state().unwrap();
            let params = self.net.params().iter().map(|p| trainer.outside(p.id)).collect();
            trainer.finish();
            (state, params)
        })
    }

    /// The whole state after the first steps of the job.
    pub fn state_after(&self, expected: &Expected, setting: &Setting, steps: u64) -> State {
        State::merge(self.parts_after(expected, setting, steps).into_iter().map(|(state, _)| state)).unwrap()
    }

    /// What is left of the job after a state, compared with a reference that knows nothing of the interruption. Returns the state
    /// that the ranks have of what they loaded.
    pub fn resume(&self, expected: &Expected, setting: &Setting, state: &State) -> State {
        let parts = self.on_seats(setting, |rank| {
            let mut trainer = Trainer::start(rank, self, setting, Internals::default(), expected);
            trainer.load(state);
            let part = trainer.engine.state().unwrap();
            self.net.params().iter().for_each(|p| drop(trainer.outside(p.id)));
            trainer.train_to_the_end();
            part
        });
        State::merge(parts).unwrap()
    }
}

/// All bits of a whole state, by what they belong to.
pub fn bits(state: &State) -> Vec<(String, Vec<u32>)> {
    let tensor = |t: &gatherflow::TensorState| {
        let fields = t.pieces.iter().flat_map(|p| [&p.master, &p.exp_avg, &p.exp_avg_sq]).flatten();
        (format!("{} {} {:?} {}", t.name, t.part, t.shape, t.group), fields.map(|x| x.to_bits()).collect())
    };
    let shared = format!("{} {:?} {:?}", state.steps, state.groups, state.scaler);
    std::iter::once((shared, vec![])).chain(state.tensors.iter().map(tensor)).collect()
}
