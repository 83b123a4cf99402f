//! A machine's monitor, on a thread of its own: it waits for the machine, and nobody waits for it.

use crate::stop::{Bell, Stop};
use hecaton_broker::Order;
use hecaton_vm::balloon::Balloon;
use hecaton_vm::memory_device::{MemoryDevice, ResizeError};
use hecaton_vm::qmp::{Monitor, QmpError};
use serde_json::json;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// How often a machine is asked for its sizes.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often while they change: QEMU's own event is throttled to one a second.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);

/// How long a monitor may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long an answer counts.
const FRESH: Duration = Duration::from_secs(3);

/// A machine's monitor. The thread ends with it, at the latest when the machine has had its time to answer.
#[derive(Debug)]
pub(super) struct MachineMonitor(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: PathBuf,
    pid: u32,
    desk: Mutex<Desk>,
    bell: Bell,
    stop: Stop,
}

/// What is to be done, and what is known.
#[derive(Debug, Default)]
struct Desk {
    /// By device; each stays until it is carried out or refused.
    sizes: BTreeMap<String, (Order, u64)>,
    power_down: bool,
    quit: bool,
    heard: Heard,
}

/// What a machine has said.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard {
    pub(super) devices: Vec<MemoryDevice>,
    /// By device, the last order that was carried out or refused before the devices were listed.
    pub(super) done: BTreeMap<String, Order>,
    /// When it last answered.
    at: Option<Instant>,
    /// The last try came to nothing.
    has_failed: bool,
}

impl Heard {
    /// Whether it answers.
    pub(super) fn is_fresh(&self) -> bool {
        !self.has_failed && self.at.is_some_and(|at| at.elapsed() < FRESH)
    }

    /// Whether it ever answered.
    pub(super) fn is_known(&self) -> bool {
        self.at.is_some()
    }

    /// Whether it has answered, or is known not to.
    pub(super) fn is_decided(&self) -> bool {
        self.at.is_some() || self.has_failed
    }
}

impl MachineMonitor {
    /// Of the machine that is this process, and listens there or will. Its virtio-mem devices are asked, or its balloon.
    pub(super) fn start(
        socket: PathBuf,
        pid: u32,
        balloon: Option<Balloon>,
    ) -> io::Result<MachineMonitor> {
        let shared = Arc::new(Shared {
            socket,
            pid,
            desk: Mutex::default(),
            bell: Bell::default(),
            stop: Stop::default(),
        });
        let thread = thread::Builder::new().name("agent-monitor".into());
        thread.spawn({
            let shared = Arc::clone(&shared);
            move || shared.run(balloon)
        })?;
        Ok(MachineMonitor(shared))
    }

    /// What it has said so far.
    pub(super) fn heard(&self) -> Heard {
        self.0.desk().heard.clone()
    }

    /// Has the guest asked for a size.
    pub(super) fn resize(&self, device: String, bytes: u64, order: Order) {
        self.0.desk().sizes.insert(device, (order, bytes));
        self.0.bell.ring();
    }

    /// Has the guest shut down, if it likes.
    pub(super) fn power_down(&self) {
        self.0.desk().power_down = true;
        self.0.bell.ring();
    }

    /// Has QEMU end.
    pub(super) fn quit(&self) {
        self.0.desk().quit = true;
        self.0.bell.ring();
    }
}

impl Drop for MachineMonitor {
    fn drop(&mut self) {
        self.0.stop.set();
        self.0.bell.ring();
    }
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().expect("no thread panics with the desk")
    }

    fn run(&self, mut balloon: Option<Balloon>) {
        let mut monitor = None;
        while !self.stop.is_set() {
            let is_busy = match self.visit(&mut monitor, balloon.as_mut()) {
                Ok(is_busy) => is_busy,
                Err(error) => {
                    tracing::debug!(socket = %self.socket.display(), %error, "a machine says nothing");
                    // What it has not answered it may answer later, to nobody.
                    monitor = None;
                    self.desk().heard.has_failed = true;
                    false
                }
            };
            self.bell.wait(if is_busy { BUSY_INTERVAL } else { INTERVAL });
        }
    }

    /// Does what is to be done, and asks for the sizes. Whether they are about to change.
    fn visit(
        &self,
        connected: &mut Option<Monitor>,
        mut balloon: Option<&mut Balloon>,
    ) -> Result<bool, QmpError> {
        if connected.is_none() {
            *connected = Some(self.connect()?);
        }
        let Some(monitor) = connected else { return Ok(false) };
        if std::mem::take(&mut self.desk().power_down) {
            monitor.execute("system_powerdown", json!({}), PATIENCE)?;
        }
        if std::mem::take(&mut self.desk().quit) {
            monitor.execute("quit", json!({}), PATIENCE)?;
        }
        let sizes = self.desk().sizes.clone();
        for (device, (_, bytes)) in &sizes {
            let (device, bytes) = (device.as_str(), *bytes);
            let asked = match &mut balloon {
                Some(balloon) => balloon.request_size(monitor, bytes, PATIENCE),
                None => monitor.request_size(device, bytes, PATIENCE),
            };
            match asked {
                Ok(()) => {}
                // Whether it was asked is not known: once more, which does no harm.
                Err(ResizeError::Monitor(
                    error @ (QmpError::Silent { .. }
                    | QmpError::Io { .. }
                    | QmpError::Protocol { .. }),
                )) => return Err(error),
                Err(refused) => tracing::warn!(device, bytes, error = %refused, "not resized"),
            }
        }
        let devices = match balloon {
            Some(balloon) => vec![balloon.device(monitor, PATIENCE)?],
            None => monitor.memory_devices(PATIENCE)?,
        };
        let mut desk = self.desk();
        let changing = devices.iter().any(|device| device.requested_bytes != device.plugged_bytes);
        desk.heard.devices = devices;
        // With the sizes as they are after it, and not before.
        for (device, (order, _)) in sizes {
            if desk.sizes.get(&device).is_some_and(|(latest, _)| *latest == order) {
                desk.sizes.remove(&device);
            }
            desk.heard.done.insert(device, order);
        }
        desk.heard.at = Some(Instant::now());
        desk.heard.has_failed = false;
        Ok(changing || !desk.sizes.is_empty())
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
