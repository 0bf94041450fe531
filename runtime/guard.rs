//! Guards: a parameter's memory to read, a gradient's memory to write.
//!
//! Both are checked leases without a copy. [`Read`] and [`Grad`] borrow their pass, so that `step` cannot run while one
//! lives (rule V3, by types); the owned ones are counted at run time. A gradient guard that is dropped without
//! [`complete`](Grad::complete) spoils the step: every rank skips it and says so.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::actors::{Element, Lease, ParamId};
use crate::error::Error;
use crate::shared::{Live, Shared};

/// What a gradient guard shows, and so what its holder must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMode {
    /// The first write of a step: the memory is old (NaN in debug builds). Assign every element.
    Overwrite,
    /// The memory holds the sum so far. Add to it.
    Accumulate,
}

/// A lease to read, seen as elements.
#[derive(Debug)]
struct Reading<S: Deref<Target = Shared>, T> {
    lease: Lease,
    _live: Live<S>,
    element: PhantomData<T>,
}

impl<S: Deref<Target = Shared>, T: Element> Reading<S, T> {
    fn new(live: Live<S>) -> Result<Self, Error> {
        let lease = live.shared.lease_param::<T>(live.param)?;
        Ok(Self { lease, _live: live, element: PhantomData })
    }

    /// Length and dtype fit since the lease was made, so this is never empty by failure.
    fn slice(&self) -> &[T] {
        self.lease.as_slice().unwrap_or_default()
    }
}

/// A parameter to read, in its own dtype. Derefs to a slice.
///
/// It borrows its pass (or engine), so `step` cannot run while it lives:
///
/// ```compile_fail,E0502
/// # fn f(mut engine: gatherflow::Engine, chunk: gatherflow::ChunkId, unit: gatherflow::UnitId, w: gatherflow::ParamId)
/// # -> Result<(), gatherflow::Error> {
/// let pass = engine.pass(chunk, 0, true, gatherflow::Mode::Train)?;
/// let entered = pass.enter(unit)?;
/// let weights = entered.read::<f32>(w)?;
/// engine.step()?; // the guard still reads what the step overwrites
/// println!("{}", weights[0]);
/// # Ok(()) }
/// ```
///
/// and it only reads:
///
/// ```compile_fail,E0594
/// # fn f(mut weights: gatherflow::Read<'_, f32>) {
/// weights[0] = 1.0;
/// # }
/// ```
#[derive(Debug)]
pub struct Read<'a, T>(Reading<&'a Shared, T>);

impl<'a, T: Element> Read<'a, T> {
    pub(crate) fn new(shared: &'a Shared, param: ParamId) -> Result<Self, Error> {
        shared.param(param)?;
        Ok(Self(Reading::new(Shared::hold(shared, param))?))
    }
}

impl<T: Element> Deref for Read<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.0.slice()
    }
}

/// A parameter to read, `'static`: counted at run time, `step` refuses while it lives.
#[derive(Debug)]
pub struct OwnedRead<T>(Reading<Arc<Shared>, T>);

impl<T: Element> OwnedRead<T> {
    pub(crate) fn new(live: Live<Arc<Shared>>) -> Result<Self, Error> {
        Ok(Self(Reading::new(live)?))
    }
}

impl<T: Element> Deref for OwnedRead<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.0.slice()
    }
}

/// A lease to write a gradient. The lease is there until the write ends.
#[derive(Debug)]
struct Writing<S: Deref<Target = Shared>, T> {
    lease: Option<Lease>,
    live: Live<S>,
    mode: WriteMode,
    element: PhantomData<T>,
}

impl<S: Deref<Target = Shared>, T: Element> Writing<S, T> {
    fn new(live: Live<S>, zeroed: bool) -> Result<Self, Error> {
        let (lease, mode) = live.shared.begin_write::<T>(live.param, zeroed)?;
        Ok(Self { lease: Some(lease), live, mode, element: PhantomData })
    }

    fn slice(&self) -> &[T] {
        self.lease.as_ref().and_then(|lease| lease.as_slice().ok()).unwrap_or_default()
    }

    fn slice_mut(&mut self) -> &mut [T] {
        self.lease.as_mut().and_then(|lease| lease.as_mut_slice().ok()).unwrap_or_default()
    }

    fn complete(mut self) {
        self.lease = None;
        // A failure here is fatal and meets the caller's next call.
        let _ = self.live.shared.end_write(self.live.param);
    }
}

impl<S: Deref<Target = Shared>, T> Drop for Writing<S, T> {
    fn drop(&mut self) {
        if self.lease.take().is_some() {
            self.live.shared.abandon_write(self.live.param);
        }
    }
}

macro_rules! gradient_guard {
    ($($generics:tt)*) => {
        impl<T: Element> $($generics)* {
            /// What the memory shows, and so whether to assign or to add.
            pub fn mode(&self) -> WriteMode {
                self.0.mode
            }

            /// Ends this write. The memory must now hold the gradient (or the sum so far).
            ///
            /// A fatal failure is not told here but by the next call.
            pub fn complete(self) {
                self.0.complete();
            }
        }

        impl<T: Element> Deref for $($generics)* {
            type Target = [T];
            fn deref(&self) -> &[T] {
                self.0.slice()
            }
        }

        impl<T: Element> DerefMut for $($generics)* {
            fn deref_mut(&mut self) -> &mut [T] {
                self.0.slice_mut()
            }
        }
    };
}

/// A gradient to write, in its own dtype (f32 unless registered otherwise). Derefs to a slice.
///
/// It borrows the unit's backward, so the unit cannot be left while it lives:
///
/// ```compile_fail,E0505
/// # fn f(pass: &gatherflow::Pass<'_>, unit: gatherflow::UnitId, w: gatherflow::ParamId) -> Result<(), gatherflow::Error> {
/// let back = pass.backward(unit)?;
/// let mut gradient = back.grad::<f32>(w)?;
/// drop(back); // the guard still writes
/// gradient[0] = 1.0;
/// # Ok(()) }
/// ```
///
/// A write ends once:
///
/// ```compile_fail,E0382
/// # fn f(mut gradient: gatherflow::Grad<'_, f32>) {
/// gradient.complete();
/// gradient[0] = 1.0; // its bucket may be on its way
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a gradient guard that is dropped without `complete` spoils the step"]
pub struct Grad<'a, T: Element>(Writing<&'a Shared, T>);

impl<'a, T: Element> Grad<'a, T> {
    pub(crate) fn new(shared: &'a Shared, param: ParamId, zeroed: bool) -> Result<Self, Error> {
        shared.param(param)?;
        Ok(Self(Writing::new(Shared::hold(shared, param), zeroed)?))
    }
}

gradient_guard!(Grad<'_, T>);

/// A gradient to write, `'static`: counted at run time, `step` refuses while it lives.
#[derive(Debug)]
#[must_use = "a gradient guard that is dropped without `complete` spoils the step"]
pub struct OwnedGrad<T: Element = f32>(Writing<Arc<Shared>, T>);

impl<T: Element> OwnedGrad<T> {
    pub(crate) fn new(live: Live<Arc<Shared>>, zeroed: bool) -> Result<Self, Error> {
        Ok(Self(Writing::new(live, zeroed)?))
    }
}

gradient_guard!(OwnedGrad<T>);
