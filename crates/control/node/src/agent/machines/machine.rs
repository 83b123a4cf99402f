//! A machine as the agent knows it: what was promised to it, what it has said, and what is in
//! memory of it.

use crate::agent::cores::CpuPlace;
use crate::agent::host_memory::{
    Held, MemoryFile, held_by_part, memory_files, resident_bytes, spread_over_parts,
};
use crate::agent::links::guest_link::GuestLink;
use crate::agent::links::monitor::{Heard, MachineMonitor};
use crate::agent::machines::container::Container;
use crate::agent::machines::record::Record;
use crate::agent::places::Places;
use crate::agent::report::{MachinePartReport, MachineReport, MachineState};
use hecaton_broker::{Device, Harvest, NewcomerKind, NodeNo, Order, Vm, VmId};
use hecaton_vm::create::{BLOCK_BYTES, Memory, Part};
use hecaton_vm::memory_device::MemoryDevice;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a domain that was admitted may take to be seen after its hook has ended: libvirt starts
/// it then, or fails to.
const PROMISE: Duration = Duration::from_secs(60);

/// A machine that was admitted.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) record: Record,
    /// None for a domain that never changes its size.
    pub(crate) monitor: Option<MachineMonitor>,
    /// Link to the manager inside a harvest VM.
    pub(crate) guest: Option<GuestLink>,
    /// By device: the size that it is asked for once the guest is ready for that.
    pub(crate) held: BTreeMap<String, (Order, u64)>,
    /// It was there before this agent, which may have to count it as large as it can be.
    pub(crate) was_found: bool,
    /// When this agent has come to know it.
    pub(crate) since: Instant,
    /// Set for a container only.
    pub(crate) container: Option<Container>,
    /// Memory files as of this look; empty for a container.
    pub(crate) files: Vec<MemoryFile>,
    pub(crate) is_shutting_down: bool,
    /// Since when it is to be gone.
    pub(crate) evicted: Option<Instant>,
    pub(crate) cpu_place: CpuPlace,
    /// How long it waited to be admitted; not known of one that was found.
    pub(crate) waited: Option<Duration>,
}

impl Machine {
    /// Last state from its monitor; empty for a machine without a monitor.
    fn heard(&self) -> Heard {
        self.monitor.as_ref().map(MachineMonitor::heard).unwrap_or_default()
    }

    /// A domain that was admitted, and has not been seen to run.
    pub(crate) fn is_promised(&self) -> bool {
        self.record.domain.as_ref().is_some_and(|domain| domain.is_promised)
    }

    pub(crate) fn has_ended(&self) -> bool {
        let is_awaited = self.is_promised() && self.since.elapsed() < PROMISE;
        // Others of a container's processes may outlive the first.
        let runs =
            self.record.process.is_alive() || self.container.as_ref().is_some_and(Container::runs);
        !runs && !is_awaited
    }

    pub(crate) fn look_into_memory(&mut self) {
        match &mut self.container {
            Some(container) => container.look(),
            None => self.files = self.files(),
        }
    }

    /// Its memory files and their resident bytes. A domain of fixed size may have memory of any
    /// kind, so its resident bytes are spread over its parts.
    fn files(&self) -> Vec<MemoryFile> {
        let pid = self.record.process.pid;
        if self.is_promised() {
            return Vec::new();
        }
        let keeps_its_size = self.record.kind != NewcomerKind::Harvest;
        match &self.record.domain {
            Some(_) if keeps_its_size => {
                let held_bytes = resident_bytes(pid).unwrap_or_default();
                spread_over_parts(&self.record.memory, held_bytes)
            }
            _ => memory_files(pid).unwrap_or_default(),
        }
    }

    /// Resident memory of each part.
    fn held(&self) -> Vec<Held> {
        match &self.container {
            Some(container) => vec![container.held(self.record.memory.base_bytes())],
            None => held_by_part(&self.record.memory, &self.files),
        }
    }

    /// Bytes in use on each node, as the host counts them. A container's page cache does not count,
    /// since the kernel can reclaim it for other programs.
    pub(crate) fn in_use_by_node(&self, places: Places<'_>) -> Vec<(NodeNo, u64)> {
        if let Some(container) = &self.container {
            let part = self.record.memory.parts.first();
            let node = part.and_then(|part| places.of(part.host_node));
            return node.map(|node| (node, container.charged().in_use_bytes)).into_iter().collect();
        }
        let held = self.held();
        let parts = self.record.memory.parts.iter().zip(held);
        parts
            .filter_map(|(part, held)| {
                Some((places.of(part.host_node)?, held.base_bytes + held.more_bytes))
            })
            .collect()
    }

    /// Its part on a node of the broker's.
    pub(crate) fn part_on(&self, node: NodeNo, places: Places<'_>) -> Option<usize> {
        let mut parts = self.record.memory.parts.iter();
        parts.position(|part| places.of(part.host_node) == Some(node))
    }

    /// Kills it, with all of a container's processes.
    pub(crate) fn kill(&self) {
        match &self.container {
            Some(container) => container.kill(),
            None => self.record.process.kill(),
        }
    }

    pub(crate) fn grow(&mut self, device: String, bytes: u64, order: Order) {
        if let Some(guest) = &self.guest {
            guest.grow(&device);
        }
        self.held.remove(&device);
        self.resize(device, bytes, order);
    }

    fn resize(&self, device: String, bytes: u64, order: Order) {
        if let Some(monitor) = &self.monitor {
            monitor.resize(device, bytes, order);
        }
    }

    /// Tells the guest the final size; the batch is taken when it is ready.
    pub(crate) fn shrink(&mut self, device: String, bytes: u64, target_bytes: u64, order: Order) {
        if let Some(guest) = &self.guest {
            let base_bytes = self.record.memory.base_bytes();
            guest.shrink(&device, target_bytes, base_bytes, &self.heard().devices);
        }
        self.held.insert(device, (order, bytes));
    }

    pub(crate) fn take_what_is_ready(&mut self) {
        if let Some(guest) = &self.guest {
            let (base_bytes, devices) = (self.record.memory.base_bytes(), self.heard().devices);
            guest.look(base_bytes, &devices);
            let asked = |device: &MemoryDevice| {
                self.held.get(&device.id).map_or(device.requested_bytes, |(_, bytes)| *bytes)
            };
            let size_bytes = base_bytes + devices.iter().map(asked).sum::<u64>();
            if guest.takes_reminder()
                && let Some(monitor) = &self.monitor
            {
                monitor.remind();
            }
            if self.held.is_empty() || !guest.may_take(size_bytes) {
                return;
            }
        }
        for (device, (order, bytes)) in std::mem::take(&mut self.held) {
            self.resize(device, bytes, order);
        }
    }

    /// As the broker is told of it.
    pub(crate) fn look(&self, id: VmId, places: Places<'_>) -> Vm {
        let heard = self.heard();
        let mut base_bytes = vec![0; places.0.len()];
        let mut devices = Vec::new();
        let most = self.record.max_bytes.saturating_sub(self.record.memory.base_bytes());
        let held = self.held();
        for ((number, part), held) in self.record.memory.parts.iter().enumerate().zip(held) {
            let Some(node) = places.of(part.host_node) else { continue };
            base_bytes[node] += part.base_bytes;
            if part.more_bytes == 0 {
                continue;
            }
            let id = Memory::device_id(number);
            let found = heard.devices.iter().find(|device| device.id == id);
            // One that this agent has admitted begins with nothing, and with a balloon with all;
            // one that was there may have all.
            let may_have_all = self.was_found || self.record.memory.is_ballooned;
            let unknown = if may_have_all { part.more_bytes } else { 0 };
            let requested_bytes = found.map_or(unknown, |device| device.requested_bytes);
            let plugged_bytes = found.map_or(unknown, |device| device.plugged_bytes);
            let mut held_bytes = vec![0; places.0.len()];
            held_bytes[node] = held.more_bytes.max(plugged_bytes);
            devices.push(Device {
                node,
                block_bytes: found.map_or(BLOCK_BYTES, |device| device.block_bytes),
                max_bytes: most.min(part.more_bytes),
                requested_bytes,
                plugged_bytes,
                held_bytes,
                scattered_bytes: 0,
                done: heard.done.get(&id).copied().unwrap_or_default(),
                is_heard: found.is_some() && heard.is_fresh(),
            });
        }
        let harvest = (self.record.kind == NewcomerKind::Harvest)
            .then_some(Harvest { max_bytes: self.record.max_bytes, devices });
        Vm { id, base_bytes, cores: self.record.cores, harvest }
    }

    pub(crate) fn report(&self, is_warned: bool) -> MachineReport {
        let heard = self.heard();
        let keeps_its_size =
            self.record.domain.is_some() && self.record.kind != NewcomerKind::Harvest;
        let state = if self.evicted.is_some() {
            MachineState::Evicted
        } else if self.is_shutting_down {
            MachineState::ShuttingDown
        } else if is_warned {
            MachineState::Warned
        } else if self.is_promised() {
            MachineState::Starting
        } else if heard.is_fresh() || keeps_its_size {
            MachineState::Running
        } else if heard.is_known() || self.was_found {
            MachineState::Silent
        } else {
            MachineState::Starting
        };
        MachineReport {
            name: self.record.name.clone(),
            kind: self.record.kind,
            state,
            pid: self.record.process.pid,
            cgroup: self.record.cgroup.clone(),
            base_bytes: self.record.memory.base_bytes(),
            max_bytes: self.record.max_bytes,
            requested_bytes: heard.devices.iter().map(|device| device.requested_bytes).sum(),
            harvested_bytes: heard.devices.iter().map(|device| device.plugged_bytes).sum(),
            held_bytes: match &self.container {
                Some(container) => container.charged().all_bytes,
                None => self.files.iter().map(|file| file.held_bytes).sum(),
            },
            cores: self.record.cores,
            cores_failure: match &self.cpu_place {
                CpuPlace::Failed(reason) => Some(reason.clone()),
                CpuPlace::Unplaced | CpuPlace::Placed => None,
            },
            guest_listens: self.guest.as_ref().map(GuestLink::listens),
            nodes: self.part_reports(),
            waited_ms: self
                .waited
                .map(|waited| u64::try_from(waited.as_millis()).unwrap_or(u64::MAX)),
        }
    }

    fn part_reports(&self) -> Vec<MachinePartReport> {
        let heard = self.heard();
        let parts = self.record.memory.parts.iter().zip(self.held()).enumerate();
        let report = |(number, (part, held)): (usize, (&Part, Held))| {
            let id = Memory::device_id(number);
            let device = heard.devices.iter().find(|device| device.id == id);
            Some(MachinePartReport {
                node: part.host_node?,
                base_bytes: part.base_bytes,
                requested_bytes: device.map_or(0, |device| device.requested_bytes),
                harvested_bytes: device.map_or(0, |device| device.plugged_bytes),
                held_bytes: held.base_bytes + held.more_bytes,
            })
        };
        parts.filter_map(report).collect()
    }
}
