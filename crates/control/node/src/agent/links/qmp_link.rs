//! A machine that is reached by QEMU's own monitor.

use crate::agent::links::monitor::{PATIENCE, Shared, Sizes};
use crate::agent::links::reminders::Reminders;
use hecaton_vm::balloon::Balloon;
use hecaton_vm::memory_device::{MemoryDevice, ResizeError};
use hecaton_vm::qmp::{Monitor, QmpError};
use serde_json::json;
use std::path::PathBuf;

/// The way to it.
#[derive(Debug)]
pub(crate) struct QmpLink {
    socket: PathBuf,
    pid: u32,
    balloon: Option<Balloon>,
    reminders: Reminders,
    connected: Option<Monitor>,
}

impl QmpLink {
    /// To the machine that is this process, and listens there or will. Its virtio-mem devices are
    /// asked, or its balloon.
    pub(crate) fn new(socket: PathBuf, pid: u32, balloon: Option<Balloon>) -> QmpLink {
        QmpLink { socket, pid, balloon, reminders: Reminders::default(), connected: None }
    }

    /// Does what is to be done. The sizes that were asked for, and the devices after that.
    pub(crate) fn visit(&mut self, desk: &Shared) -> Result<(Sizes, Vec<MemoryDevice>), QmpError> {
        let visited = self.visit_connected(desk);
        if visited.is_err() {
            // The next visit connects anew, so that a late answer is not taken for another one.
            self.connected = None;
        }
        visited
    }

    fn visit_connected(&mut self, desk: &Shared) -> Result<(Sizes, Vec<MemoryDevice>), QmpError> {
        let mut monitor = match self.connected.take() {
            Some(monitor) => monitor,
            None => self.connect()?,
        };
        if desk.takes_power_down() {
            monitor.execute("system_powerdown", json!({}), PATIENCE)?;
        }
        if desk.takes_quit() {
            monitor.execute("quit", json!({}), PATIENCE)?;
        }
        // A balloon's driver goes on by itself.
        if desk.takes_remind() && self.balloon.is_none() {
            self.reminders.note(&desk.devices());
        }
        let sizes = desk.sizes();
        for (device, (_, bytes)) in &sizes {
            self.reminders.forget(device);
            ask(&mut monitor, self.balloon.as_mut(), device, *bytes)?;
        }
        self.reminders.say(|device, bytes| ask(&mut monitor, None, device, bytes))?;
        let devices = match &mut self.balloon {
            Some(balloon) => vec![balloon.device(&mut monitor, PATIENCE)?],
            None => monitor.memory_devices(PATIENCE)?,
        };
        self.connected = Some(monitor);
        Ok((sizes, devices))
    }

    fn connect(&self) -> Result<Monitor, QmpError> {
        let monitor = Monitor::connect(&self.socket, PATIENCE)?;
        // None from another process namespace.
        match monitor.peer_pid() {
            Some(pid) if pid != self.pid => Err(QmpError::Protocol {
                path: self.socket.clone(),
                reason: format!("process {pid} listens there, and the machine is {}", self.pid),
            }),
            _ => Ok(monitor),
        }
    }
}

/// Asks the guest for a size. One that is refused is said to be, and that is all; an error is that
/// whether it was asked is not known: it is once more, which does no harm.
fn ask(
    monitor: &mut Monitor,
    balloon: Option<&mut Balloon>,
    device: &str,
    bytes: u64,
) -> Result<(), QmpError> {
    let asked = match balloon {
        Some(balloon) => balloon.request_size(monitor, bytes, PATIENCE),
        None => monitor.request_size(device, bytes, PATIENCE),
    };
    match asked {
        Ok(()) => Ok(()),
        Err(ResizeError::Monitor(error)) if !matches!(error, QmpError::Refused { .. }) => {
            Err(error)
        }
        Err(refused) => {
            tracing::warn!(device, bytes, error = %refused, "not resized");
            Ok(())
        }
    }
}
