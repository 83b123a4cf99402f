//! What a machine says and is told, on a thread of its own: it waits for the machine, and nobody waits for it.

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

/// How often while they change: QEMU's own event is throttled to one a second.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);

/// How long a machine may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// How long an answer counts.
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

/// A machine's monitor. The thread ends with it, at the latest when the machine has had its time to answer.
#[derive(Debug)]
pub(crate) struct MachineMonitor(Arc<Shared>);

#[derive(Debug, Default)]
pub(crate) struct Shared {
    desk: Mutex<Desk>,
    bell: Bell,
    stop: Stop,
}

/// By device: an order, and the size that the guest is to be asked for.
pub(crate) type Sizes = BTreeMap<String, (Order, u64)>;

/// What is to be done, and what is known.
#[derive(Debug, Default)]
struct Desk {
    /// By device; each stays until it is carried out or refused.
    sizes: Sizes,
    power_down: bool,
    quit: bool,
    remind: bool,
    heard: Heard,
}

/// What a machine has said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Heard {
    pub(crate) devices: Vec<MemoryDevice>,
    /// By device, the last order that was carried out or refused before the devices were listed.
    pub(crate) done: BTreeMap<String, Order>,
    /// When it last answered.
    at: Option<Instant>,
    /// The last try came to nothing.
    has_failed: bool,
}

impl Heard {
    /// Whether it answers.
    pub(crate) fn is_fresh(&self) -> bool {
        !self.has_failed && self.at.is_some_and(|at| at.elapsed() < FRESH)
    }

    /// Whether it ever answered.
    pub(crate) fn is_known(&self) -> bool {
        self.at.is_some()
    }

    /// Whether it has answered, or is known not to.
    pub(crate) fn is_decided(&self) -> bool {
        self.at.is_some() || self.has_failed
    }
}

impl MachineMonitor {
    /// Of the machine that is reached so. `devices`: what is known of them already.
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

    /// What it has said so far.
    pub(crate) fn heard(&self) -> Heard {
        self.0.desk().heard.clone()
    }

    /// Has the guest asked for a size.
    pub(crate) fn resize(&self, device: String, bytes: u64, order: Order) {
        self.0.desk().sizes.insert(device, (order, bytes));
        self.0.bell.ring();
    }

    /// Has the guest asked once more for what it was asked for, as far as it has not given that.
    pub(crate) fn remind(&self) {
        self.0.desk().remind = true;
        self.0.bell.ring();
    }

    /// Has the guest shut down, if it likes.
    pub(crate) fn power_down(&self) {
        self.0.desk().power_down = true;
        self.0.bell.ring();
    }

    /// Has QEMU end.
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

    /// Does what is to be done, and asks for the sizes. Whether they are about to change.
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

    /// Whether the guest is to shut down: said once.
    pub(crate) fn takes_power_down(&self) -> bool {
        std::mem::take(&mut self.desk().power_down)
    }

    /// Whether the machine is to end: said once.
    pub(crate) fn takes_quit(&self) -> bool {
        std::mem::take(&mut self.desk().quit)
    }

    /// Whether the guest is to be asked once more: said once.
    pub(crate) fn takes_remind(&self) -> bool {
        std::mem::take(&mut self.desk().remind)
    }

    /// The sizes that are to be asked for, by device.
    pub(crate) fn sizes(&self) -> Sizes {
        self.desk().sizes.clone()
    }

    /// The devices as they were when it last answered.
    pub(crate) fn devices(&self) -> Vec<MemoryDevice> {
        self.desk().heard.devices.clone()
    }

    /// It does not answer, or not in time.
    pub(crate) fn has_failed(&self) {
        self.desk().heard.has_failed = true;
    }

    /// Whether nobody needs the machine's answer any more.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.is_set()
    }
}
