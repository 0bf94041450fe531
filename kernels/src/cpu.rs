//! The CPU device: streams are threads.
use crate::collective::Transport;
use crate::device::Device;
use crate::error::DeviceError;
use std::sync::Arc;
use std::time::Duration;

/// A device whose streams are threads of this process.
#[derive(Debug)]
pub struct CpuDevice {}

impl CpuDevice {
    /// Starts a device over a transport. A host thread parks at most `wait_limit` on one event.
    ///
    /// # Errors
    /// [`DeviceError::Thread`].
    pub fn open(transport: Arc<dyn Transport>, wait_limit: Duration) -> Result<Arc<dyn Device>, DeviceError> {
        let _ = (transport, wait_limit);
        unimplemented!()
    }
}
