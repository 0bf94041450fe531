//! From names to a device: the only place where devices and transports are called by name.

use std::sync::Arc;
use std::time::Duration;

use crate::collective::Comm;
use crate::cpu::{BeforeWork, CpuDevice};
use crate::device::Device;
use crate::error::DeviceError;
use crate::local::LocalWorld;
use crate::null::{Gate, NullDevice, Script};

/// Where this rank stands among the others.
#[derive(Clone, Debug)]
pub struct Place {
    /// What the ranks of one process share.
    pub world: Arc<LocalWorld>,
    /// This rank, `0..world.ranks()`.
    pub rank: usize,
}

/// What to open, by name, and with which limits.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// `cpu` or `null`.
    pub device: String,
    /// `local`.
    pub transport: String,
    /// Longest time that a host thread parks on one event. A backstop: whoever supervises ends waits earlier.
    pub wait_limit: Duration,
    /// Null device: the verdict of each step (default: every step is updated).
    pub script: Option<Script>,
    /// Null device, for tests: what holds verdicts back.
    #[doc(hidden)]
    pub gate: Option<Gate>,
    /// Null device: keep the log (default). Without it only the cost of the calls remains, for benchmarks.
    pub keep_log: bool,
    /// Says of the transport that issuing may block, so that collectives go through the issuing thread.
    pub issue_on_thread: bool,
    /// Cpu device, for tests: what goes wrong, or is late, before each piece of work.
    #[doc(hidden)]
    pub before_work: Option<BeforeWork>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            device: "cpu".into(),
            transport: "local".into(),
            wait_limit: Duration::from_mins(20),
            script: None,
            gate: None,
            keep_log: true,
            issue_on_thread: false,
            before_work: None,
        }
    }
}

/// A device and the only right to issue collectives on it.
#[derive(Debug)]
pub struct Opened {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The communicator's handle.
    pub comm: Comm,
}

/// Opens the device and transport that the options name.
///
/// # Errors
/// [`DeviceError::Unknown`] names what is not in this build; otherwise what the device says.
pub fn open(options: &OpenOptions, place: &Place) -> Result<Opened, DeviceError> {
    if options.transport != "local" {
        return Err(DeviceError::Unknown { what: "transport", name: options.transport.clone(), known: "local" });
    }
    let device: Arc<dyn Device> = match options.device.as_str() {
        "cpu" => {
            let transport = Arc::new(place.world.transport(place.rank)?);
            CpuDevice::open(transport, options.wait_limit, options.before_work.clone())
        }
        "null" => {
            let (ranks, script) = (place.world.ranks(), options.script.clone());
            NullDevice::open_gated(place.rank, ranks, script, options.keep_log, options.gate.clone())
        }
        other => return Err(DeviceError::Unknown { what: "device", name: other.into(), known: "cpu, null" }),
    };
    let comm = Comm::new(device.clone(), options.issue_on_thread, place.rank, place.world.ranks());
    Ok(Opened { device, comm })
}
