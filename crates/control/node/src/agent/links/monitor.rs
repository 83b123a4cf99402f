//! Queries and commands one machine on its own thread. No other thread waits for the machine.

use crate::agent::links::container_link::ContainerLink;
use crate::agent::links::domain_link::DomainLink;
use crate::agent::links::qmp_link::QmpLink;
use crate::causes::with_causes;
use crate::stop::{Bell, Stop};
use hecaton_broker::Order;
use hecaton_vm::memory_device::MemoryDevice;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// How often a machine is asked for its sizes.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often while its sizes change: QEMU throttles its own event to one a second.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);

/// How long a machine may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// How long an answer counts as fresh.
const FRESH: Duration = Duration::from_secs(3);

/// How a machine is reached.
#[derive(Debug)]
pub(crate) enum Link {
    /// By QEMU's own monitor.
    Qmp(QmpLink),
    /// Through libvirt.
    Domain(DomainLink),
    /// By its memory cgroup.
    Container(ContainerLink),
}

/// A machine's monitor. Its thread ends with it, or once a pending answer has come or timed out.
#[derive(Debug)]
pub(crate) struct MachineMonitor(Arc<Shared>);

#[derive(Debug, Default)]
pub(crate) struct Shared {
    desk: Mutex<Desk>,
    bell: Bell,
    stop: Stop,
}

/// By device: an order, and the size to request from the guest.
pub(crate) type Sizes = BTreeMap<String, (Order, u64)>;

/// Pending requests to the machine, and its last answers.
#[derive(Debug, Default)]
struct Desk {
    /// By device; each stays until it is carried out or refused.
    sizes: Sizes,
    power_down: bool,
    quit: bool,
    remind: bool,
    heard: Heard,
}

/// The last answers of a machine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard {
    pub(crate) devices: Vec<MemoryDevice>,
    /// By device, the last order that was carried out or refused before the devices were listed.
    pub(crate) done: BTreeMap<String, Order>,
    /// When the machine last answered.
    at: Option<Instant>,
    /// The last attempt failed.
    has_failed: bool,
}

impl Heard {
    /// Whether the machine answers.
    pub(crate) fn is_fresh(&self) -> bool {
        !self.has_failed && self.at.is_some_and(|at| at.elapsed() < FRESH)
    }

    /// Whether the machine ever answered.
    pub(crate) fn is_known(&self) -> bool {
        self.at.is_some()
    }

    /// Whether the machine ever answered, or its last attempt failed.
    pub(crate) fn is_decided(&self) -> bool {
        self.at.is_some() || self.has_failed
    }
}

impl MachineMonitor {
    /// Starts the thread of the machine behind `link`, with the `devices` that are known already.
    pub(crate) fn start(link: Link, devices: Vec<MemoryDevice>) -> io::Result<MachineMonitor> {
        let shared = Arc::new(Shared::default());
        shared.desk().heard.devices = devices;
        let thread = thread::Builder::new().name("agent-monitor".into());
        thread.spawn({
            let shared = Arc::clone(&shared);
            move || shared.run(link)
        })?;
        Ok(MachineMonitor(shared))
    }

    /// The last answers of the machine.
    pub(crate) fn heard(&self) -> Heard {
        self.0.desk().heard.clone()
    }

    /// Queues a size request to the guest.
    pub(crate) fn resize(&self, device: String, bytes: u64, order: Order) {
        self.0.desk().sizes.insert(device, (order, bytes));
        self.0.bell.ring();
    }

    /// Queues a repetition of the size requests that the guest has not met yet.
    pub(crate) fn remind(&self) {
        self.0.desk().remind = true;
        self.0.bell.ring();
    }

    /// Queues a shutdown request, which the guest may ignore.
    pub(crate) fn power_down(&self) {
        self.0.desk().power_down = true;
        self.0.bell.ring();
    }

    /// Queues the command that ends the machine.
    pub(crate) fn quit(&self) {
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

    fn run(&self, mut link: Link) {
        while !self.stop.is_set() {
            let is_busy = match self.visit(&mut link) {
                Ok(is_busy) => is_busy,
                Err(error) => {
                    tracing::debug!(error, "a machine says nothing");
                    self.has_failed();
                    false
                }
            };
            self.bell.wait(if is_busy { BUSY_INTERVAL } else { INTERVAL });
        }
    }

    /// Sends pending requests, then reads the sizes. Returns whether the sizes are about to change.
    fn visit(&self, link: &mut Link) -> Result<bool, String> {
        let asked = match link {
            Link::Qmp(link) => link.visit(self).map_err(|error| error.to_string()),
            Link::Domain(link) => link.visit(self),
            Link::Container(link) => link.visit(self).map_err(|error| with_causes(&error)),
        };
        let (sizes, devices) = asked?;
        let mut desk = self.desk();
        let changing = devices.iter().any(|device| device.requested_bytes != device.plugged_bytes);
        desk.heard.devices = devices;
        // Publish a finished order only together with the sizes that were read after it.
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

    /// Takes the pending shutdown request: true only once.
    pub(crate) fn takes_power_down(&self) -> bool {
        std::mem::take(&mut self.desk().power_down)
    }

    /// Takes the pending command that ends the machine: true only once.
    pub(crate) fn takes_quit(&self) -> bool {
        std::mem::take(&mut self.desk().quit)
    }

    /// Takes the pending repetition of size requests: true only once.
    pub(crate) fn takes_remind(&self) -> bool {
        std::mem::take(&mut self.desk().remind)
    }

    /// The pending size requests, by device.
    pub(crate) fn sizes(&self) -> Sizes {
        self.desk().sizes.clone()
    }

    /// The devices as they were when the machine last answered.
    pub(crate) fn devices(&self) -> Vec<MemoryDevice> {
        self.desk().heard.devices.clone()
    }

    /// Records that the machine did not answer, or not in time.
    pub(crate) fn has_failed(&self) {
        self.desk().heard.has_failed = true;
    }

    /// Whether the monitor was dropped, so that no answer is needed any more.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.is_set()
    }
}
