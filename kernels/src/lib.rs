//! Everything that is enqueued on a stream, and the streams themselves.
//!
//! This crate is the lower half of gatherflow: devices, buffers, events, the fused Adam pass, gradient norms, casts and
//! collectives. Above it nothing names a device or a transport: work is *data* ([`Work`]), a [`Device`] is an
//! interpreter of that data, and [`open`] turns two names into one.
//!
//! | module | idea |
//! | --- | --- |
//! | [`device`] | the seam: the object-safe [`Device`], streams, executor accesses and marks |
//! | [`work`] | [`Work`], every variant stating what it reads and writes |
//! | [`collective`], [`members`] | collectives as data, who takes part, and the object-safe [`Transport`] that runs them |
//! | [`event`] | [`Event`]: pending, done or failed, with bounded spin, then park |
//! | [`buffer`], [`lease`] | flat allocations, byte ranges, and run-time checked host slices |
//! | [`adam`], [`norm`], [`finite`], [`convert`], [`verdict`] | the arithmetic, same bits on every instruction set ([`isa`]) |
//! | [`cpu`], [`local`] | the CPU device (streams are threads), and ranks as threads of one process |
//! | [`fnv`] | the hash that ranks compare |
//! | [`null`], [`check`] | the device that only logs, and the happens-before checker over its log |
//!
//! Unsafe code lives in this crate only, in the files that say so in their first lines.

pub mod adam;
pub mod buffer;
pub mod check;
pub mod clock;
pub mod collective;
pub mod convert;
pub mod cpu;
pub mod device;
pub mod dtype;
pub mod error;
pub mod event;
pub mod finite;
pub mod fnv;
pub mod isa;
pub mod lease;
pub mod local;
#[cfg(feature = "matmul")]
pub mod matmul;
pub mod members;
pub mod norm;
pub mod null;
mod open;
pub mod verdict;
pub mod work;

pub use buffer::{BufRange, Buffer, BufferId};
pub use collective::{Collective, CollectiveKey, CollectiveKind, CollectiveOp, Comm, Transport};
pub use device::{Access, AccessMode, Device, Mark, Span, StreamId, StreamKind};
pub use dtype::{DType, Element};
pub use error::{Cause, CommError, DeviceError, Failure, FailureKind, LeaseError};
pub use event::{Event, EventStatus, Notify};
pub use lease::Lease;
pub use local::{Link, LocalWorld};
pub use members::Members;
pub use open::{OpenOptions, Opened, Place, open};
pub use work::Work;
