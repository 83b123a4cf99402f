//! The agent's thread: looks at the host, has the broker decide, and carries out what it says.

use super::cores::{Cores, CpuPlace};
use super::divide::divide;
use super::host_memory::{self, NodeMemory, OtherUse, managed};
use super::lending::{Lending, committed_bytes, lenders, lending, shares_memory};
use super::places::Places;
use super::report::{
    AgentReport, GaveWayReport, HarvestShare, HarvestWord, LibvirtReport, MachineReport,
    NewcomerReport, NodeMemoryReport,
};
use super::{AgentConfig, AgentError, Arrival, Shared};
use crate::agent::links::container_link::ContainerLink;
use crate::agent::links::domain_link::DomainLink;
use crate::agent::links::guest_link::GuestLink;
use crate::agent::links::monitor::{Link, MachineMonitor};
use crate::agent::links::notices::Notices;
use crate::agent::links::qmp_link::QmpLink;
use crate::agent::machines::container::{self, Container};
use crate::agent::machines::domain_plan::plan;
use crate::agent::machines::domains::Domains;
use crate::agent::machines::machine::Machine;
use crate::agent::machines::process::ProcessId;
use crate::agent::machines::record::{Directory, DomainRecord, Record};
use crate::cluster::report::check_name;
use crate::donors::{DonorReport, DonorSpec};
use crate::node::Inner;
use crate::socket::message::{Admitted, CreateVm};
use hecaton_broker::{
    Action, Broker, Elastic, EvictWhy, Host, Newcomer, NewcomerKind, NodeNo, NumaNode, Settings,
    VmId, Waits,
};
use hecaton_vm::balloon::Balloon;
use hecaton_vm::create::{BLOCK_BYTES, Memory, check_sizes};
use hecaton_vm::domain::harvest::is_uuid;
use hecaton_vm::memory_device::MemoryDevice;
use hecaton_vm::virsh::Virsh;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// How often the host is looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// How often while somebody waits.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);

/// Wait for the sizes of machines found at the start. Afterwards their maximum counts.
const FIRST_PATIENCE: Duration = Duration::from_secs(5);

/// How long QEMU may take to end when it is told to, before it is killed.
const QUIT_PATIENCE: Duration = Duration::from_secs(3);

/// Most machines of a host.
const MAX_MACHINES: usize = 1024;

/// How long, and for how many harvest VMs, the agent remembers that they ended for others. The
/// launcher asks right after its VM ends.
const GAVE_WAY_FOR: Duration = Duration::from_secs(600);
const MAX_GAVE_WAY: usize = MAX_MACHINES;

/// All that the agent knows.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    directory: Directory,
    /// libvirt's domains; `None` without `--libvirt`.
    domains: Option<Domains>,
    manage_bytes: Option<u64>,
    settings: Settings,
    guest_patience: Option<Duration>,
    broker: Broker,
    begun: Instant,
    /// The kernel's numbers of the NUMA nodes; the broker's are their places here.
    nodes: Vec<u32>,
    memory: Vec<NodeMemory>,
    cores: Cores,
    other_use: Vec<OtherUse>,
    last_id: u64,
    machines: BTreeMap<VmId, Machine>,
    waiting: Vec<Waiting>,
    /// Machines evicted within the last `replace_after`, by name. A VM that comes by the same name
    /// gets the old id, so that the broker keeps it away for a while.
    evicted: BTreeMap<String, (VmId, Instant)>,
    gave_way: VecDeque<GaveWay>,
    /// By NUMA node.
    lending: Vec<Lending>,
}

/// A harvest VM that has ended for others.
#[derive(Debug)]
struct GaveWay {
    name: String,
    pid: u32,
    at: Instant,
}

/// One that waits to be admitted.
#[derive(Debug)]
struct Waiting {
    newcomer: Newcomer,
    wish: CreateVm,
    process: ProcessId,
    since: Instant,
    /// It was looked at, and there was no memory for it.
    was_passed_over: bool,
    answer: Sender<Result<Admitted, String>>,
}

impl Keeper {
    pub(super) fn new(
        config: &AgentConfig,
        directory: Directory,
        donors: &[DonorSpec],
        shared: Arc<Shared>,
    ) -> Result<Keeper, AgentError> {
        let memory = host_memory::read()?;
        let totals: Vec<u64> = memory.iter().map(|node| node.total_bytes).collect();
        let host = totals.iter().sum();
        if let Some(manage) = config.manage_bytes.filter(|manage| *manage > host) {
            return Err(AgentError::Manage { manage, host });
        }
        let of_all = |donor: &&DonorSpec| {
            !donor.memory.huge_pages && donor.memory.numa_node.is_none() && memory.len() > 1
        };
        if let Some(donor) = donors.iter().find(of_all) {
            return Err(AgentError::LendsOfAllNodes(donor.name.clone()));
        }
        let settings = config.settings.clone();
        settings.check_host(&managed(&totals, config.manage_bytes))?;
        let domains = config.libvirt.clone().map(|uri| Domains::start(Virsh::new(uri)));
        Ok(Keeper {
            shared,
            cores: Cores::new(config.manage_cores, directory.path())?,
            directory,
            domains: domains.transpose()?,
            manage_bytes: config.manage_bytes,
            broker: Broker::new(settings.clone())?,
            settings,
            guest_patience: config.guest_patience,
            begun: Instant::now(),
            nodes: memory.iter().map(|node| node.node).collect(),
            lending: memory.iter().map(|_| Lending::default()).collect(),
            other_use: memory.iter().map(|_| OtherUse::default()).collect(),
            memory,
            last_id: 0,
            machines: BTreeMap::new(),
            waiting: Vec::new(),
            evicted: BTreeMap::new(),
            gave_way: VecDeque::new(),
        })
    }

    /// Until the agent is stopped, or its node is gone.
    pub(super) fn run(mut self, node: &Weak<Inner>) {
        self.find_machines();
        if let Some(node) = node.upgrade() {
            let places = Places(&self.nodes);
            for donor in node.donor_reports().iter().filter(|donor| shares_memory(donor)) {
                if let Some(at) = places.of(donor.memory.numa_node) {
                    self.lending[at].limit_bytes += node.host_limit(&donor.name);
                }
            }
        }
        while !self.shared.stop.is_set() {
            let Some(node) = node.upgrade() else { return };
            self.step(&node);
            drop(node);
            let is_quiet = self.waiting.is_empty();
            self.shared.bell.wait(if is_quiet { INTERVAL } else { BUSY_INTERVAL });
        }
    }

    /// The machines that an agent before this one has left.
    fn find_machines(&mut self) {
        let records = self.directory.records().unwrap_or_else(|error| {
            tracing::error!(%error, dir = %self.directory.path().display(), "cannot be read");
            Vec::new()
        });
        for record in records {
            // A promised domain may still start: its record does not say how old the promise is.
            let is_promised = record.domain.as_ref().is_some_and(|domain| domain.is_promised);
            let runs = record.process.is_alive()
                || record.cgroup.as_deref().is_some_and(container::runs_at);
            if !runs && !is_promised {
                self.bury(record);
                continue;
            }
            let name = record.name.clone();
            match self.enter(record, None, Vec::new()) {
                // Warnings begin anew.
                Ok(id) => self.gives_way(id, false),
                Err(error) => {
                    tracing::error!(
                        vm = name,
                        error,
                        "a machine is left out, and counts as other use"
                    );
                }
            }
        }
        // Before a launcher among them hears that it was admitted.
        self.cores.keep(&mut self.machines);
        let begun = Instant::now();
        let is_in_time = || {
            thread::sleep(Duration::from_millis(20));
            begun.elapsed() < FIRST_PATIENCE
        };
        while self.domains.as_ref().is_some_and(|domains| !domains.is_decided()) && is_in_time() {}
        self.find_domains();
        let is_undecided = |machine: &Machine| {
            machine.monitor.as_ref().is_some_and(|monitor| !monitor.heard().is_decided())
        };
        while self.machines.values().any(is_undecided) && is_in_time() {}
    }

    /// libvirt's domains as they are now, if they take part.
    fn find_domains(&mut self) {
        let Some(domains) = &self.domains else { return };
        let nodes: Vec<_> = self.nodes.iter().copied().zip(self.totals()).collect();
        for found in domains.found() {
            let (mut record, unfit) = plan(&found.domain, found.process, &nodes);
            let stem = record.stem();
            let before = self.machines.iter().find(|(_, machine)| machine.record.stem() == stem);
            let before = before.map(|(id, machine)| (*id, machine.record.clone()));
            if let Some((_, before)) = &before {
                record.gives_way = before.gives_way && before.process == record.process;
                if *before == record {
                    continue;
                }
            }
            if let Some(reason) = unfit {
                tracing::warn!(
                    vm = record.name,
                    reason,
                    "it is no harvest VM, and counts as a regular one"
                );
            }
            let before = before.and_then(|(id, _)| self.machines.remove(&id));
            let devices = found
                .domain
                .harvest
                .into_iter()
                .map(|growing| MemoryDevice { id: Memory::device_id(0), ..growing.device });
            if let Err(error) = self.directory.write(&record) {
                tracing::warn!(vm = record.name, %error, "that it is there is not written down");
            }
            let name = record.name.clone();
            match self.enter(record, None, devices.collect()) {
                Ok(id) => {
                    if let Some(machine) = self.machines.get_mut(&id) {
                        machine.waited = before.and_then(|before| before.waited);
                    }
                }
                Err(error) => {
                    tracing::error!(
                        vm = name,
                        error,
                        "a domain is left out, and counts as other use"
                    );
                }
            }
        }
    }

    /// Link to a machine; `None` for a domain that is promised, of fixed size, or not asked for.
    fn link(&self, record: &Record, container: Option<&Container>) -> Result<Option<Link>, String> {
        let more_bytes: u64 = record.memory.parts.iter().map(|part| part.more_bytes).sum();
        if let Some(container) = container {
            let (group, base_bytes) = (container.group().clone(), record.memory.base_bytes());
            return Ok(Some(Link::Container(ContainerLink::new(group, base_bytes, more_bytes))));
        }
        let Some(domain) = &record.domain else {
            let socket = self.directory.socket(&record.name)?;
            let balloon = record.memory.is_ballooned.then(|| {
                let base_bytes = record.memory.base_bytes();
                Balloon::new(Memory::device_id(0), base_bytes, more_bytes, BLOCK_BYTES)
            });
            return Ok(Some(Link::Qmp(QmpLink::new(socket, record.process.pid, balloon))));
        };
        let changes = record.kind == NewcomerKind::Harvest && !domain.is_promised;
        let virsh = self.domains.as_ref().filter(|_| changes).map(Domains::virsh);
        Ok(virsh.map(|virsh| Link::Domain(DomainLink::new(virsh.clone(), domain.uuid.clone()))))
    }

    /// `waited`: time until its admission; `None` if this agent found it running. `devices`: the
    /// known state of its devices.
    fn enter(
        &mut self,
        record: Record,
        waited: Option<Duration>,
        devices: Vec<MemoryDevice>,
    ) -> Result<VmId, String> {
        let container = record.cgroup.as_deref();
        let container = container.map(|path| Container::open(path, record.memory.base_bytes()));
        let container = container.transpose()?;
        let link = self.link(&record, container.as_ref())?;
        let monitor = link.map(|link| MachineMonitor::start(link, devices)).transpose();
        let monitor =
            monitor.map_err(|error| format!("its monitor cannot be followed: {error}"))?;
        let port = match &record.domain {
            Some(domain) => domain.guest_port.clone(),
            None => self.guest_socket(&record.name, record.kind)?,
        };
        let guest = port.map(|socket| {
            let notices = Notices::new(self.guest_patience);
            GuestLink::start(socket, notices, self.begun, Arc::clone(&self.shared))
        });
        let guest = guest.transpose();
        let guest = guest.map_err(|error| format!("its guest cannot be told anything: {error}"))?;
        let id = self.next_id();
        let machine = Machine {
            record,
            monitor,
            guest,
            held: BTreeMap::new(),
            was_found: waited.is_none(),
            since: Instant::now(),
            container,
            files: Vec::new(),
            is_shutting_down: false,
            evicted: None,
            cpu_place: CpuPlace::default(),
            waited,
        };
        self.machines.insert(id, machine);
        Ok(id)
    }

    /// Where the port of the manager inside a machine listens, if it shrinks at all.
    fn guest_socket(&self, name: &str, kind: NewcomerKind) -> Result<Option<PathBuf>, String> {
        let shrinks = kind == NewcomerKind::Harvest;
        shrinks.then(|| self.directory.guest_socket(name)).transpose()
    }

    fn next_id(&mut self) -> VmId {
        self.last_id += 1;
        VmId(self.last_id)
    }

    fn step(&mut self, node: &Inner) {
        // First: whoever starts a machine again when it has ended comes by its name.
        self.forget_who_is_gone();
        self.find_domains();
        self.take_arrivals();
        if let Some(domains) = &self.domains {
            domains.pause(self.a_domain_waits());
        }
        match host_memory::read() {
            Ok(memory) => self.memory = memory,
            Err(error) => tracing::warn!(%error, "the host's memory cannot be read"),
        }
        let donors = node.donor_reports();
        // For all of this step, and in its report.
        let word = *self.shared.harvest_word();
        self.broker.set_harvest_quota(self.settings.harvest_quota.min(word.most()));
        let now = self.begun.elapsed();
        let host = self.look(&donors, now);
        for action in self.broker.step(&host, now) {
            self.carry_out(action, node, &donors);
        }
        self.waiting.iter_mut().for_each(|waiting| waiting.was_passed_over = true);
        self.machines.values_mut().for_each(Machine::take_what_is_ready);
        self.cores.keep(&mut self.machines);
        let report = self.report(word);
        *self.shared.report() = Some(report);
    }

    /// Whether one is in libvirt's hook: its launcher runs.
    fn a_domain_waits(&self) -> bool {
        self.waiting.iter().any(|waiting| waiting.wish.domain.is_some())
            || self
                .machines
                .values()
                .any(|machine| machine.is_promised() && machine.record.process.is_alive())
    }

    /// Checks who came, and puts them into the queue.
    fn take_arrivals(&mut self) {
        let arrivals = match &mut *self.shared.arrivals() {
            Some(arrivals) => std::mem::take(arrivals),
            None => return,
        };
        for arrival in arrivals {
            let Arrival { wish, process, answer } = arrival;
            // One who has gone away needs no answer.
            match self.receive(&wish, process) {
                Ok(Received::IsThere(admitted)) => drop(answer.send(Ok(admitted))),
                Ok(Received::Waits(at)) => self.waiting[at].answer = answer,
                Ok(Received::Comes(newcomer)) => {
                    let since = Instant::now();
                    let was_passed_over = false;
                    let one = Waiting { newcomer, wish, process, since, was_passed_over, answer };
                    self.waiting.push(one);
                }
                Err(reason) => drop(answer.send(Err(reason))),
            }
        }
    }

    fn receive(&mut self, wish: &CreateVm, process: ProcessId) -> Result<Received, String> {
        self.check_who(wish)?;
        let (monitor, guest_port) = self.sockets(wish)?;
        self.forget_promise(wish, process);
        check_sizes(wish.bytes, wish.max_bytes).map_err(|error| error.to_string())?;
        let known = self.machines.values().find(|machine| machine.record.name == wish.name);
        if let Some(machine) = known {
            // Its launcher has lost the agent that admitted it before it heard so.
            if machine.record.process != process {
                return Err(self.taken(&wish.name));
            }
            machine.container.iter().try_for_each(|container| container.take_in(process))?;
            let memory = machine.record.memory.clone();
            return Ok(Received::IsThere(Admitted { memory, monitor, guest_port }));
        }
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.wish.name == wish.name) {
            return match self.waiting[at].process == process {
                true => Ok(Received::Waits(at)),
                false => Err(self.taken(&wish.name)),
            };
        }
        if self.machines.len() + self.waiting.len() >= MAX_MACHINES {
            return Err(format!("{MAX_MACHINES} machines are the most that one agent has"));
        }
        let node = wish.numa_node.map(|number| {
            let at = self.nodes.iter().position(|node| *node == number);
            at.ok_or_else(|| {
                let there: Vec<_> = self.nodes.iter().map(u32::to_string).collect();
                format!("the host has no NUMA node {number}; it has {}", there.join(", "))
            })
        });
        let node = node.transpose()?;
        if (wish.balloon || wish.container) && node.is_none() && self.nodes.len() > 1 {
            let there: Vec<_> = self.nodes.iter().map(u32::to_string).collect();
            let what = if wish.container { "a container" } else { "a machine with a balloon" };
            return Err(format!(
                "{what} has memory of one NUMA node, and the host has {}; name one with --numa",
                there.join(", ")
            ));
        }
        if wish.container {
            self.place(wish)?;
        }
        let before = self.evicted.get(&wish.name).map(|(id, _)| *id);
        Ok(Received::Comes(Newcomer {
            id: before.unwrap_or_else(|| self.next_id()),
            kind: wish.kind,
            // Nothing keeps a guest from using all before its balloon is there.
            bytes: if wish.balloon { wish.max_bytes } else { wish.bytes },
            cores: wish.cores,
            node,
        }))
    }

    fn check_who(&self, wish: &CreateVm) -> Result<(), String> {
        let Some(uuid) = &wish.domain else {
            return check_name(&wish.name).map_err(|error| error.to_string());
        };
        if self.domains.is_none() {
            return Err("the node's agent does not ask libvirt; start it with --libvirt".to_owned());
        }
        match is_uuid(uuid) {
            true => Ok(()),
            false => Err(format!("`{uuid}` is no UUID of a domain")),
        }
    }

    /// Sockets of its monitor and of the manager inside the VM. libvirt chooses both for a domain,
    /// and a container has no monitor.
    fn sockets(&self, wish: &CreateVm) -> Result<(PathBuf, Option<PathBuf>), String> {
        if wish.domain.is_some() {
            return Ok((PathBuf::new(), None));
        }
        let monitor = match wish.container {
            true => PathBuf::new(),
            false => self.directory.socket(&wish.name)?,
        };
        Ok((monitor, self.guest_socket(&wish.name, wish.kind)?))
    }

    /// A domain that asks anew was not started when it had been admitted.
    fn forget_promise(&mut self, wish: &CreateVm, process: ProcessId) {
        let is_older = |machine: &Machine| {
            let domain = machine.record.domain.as_ref();
            let uuid = domain.filter(|domain| domain.is_promised).map(|domain| &domain.uuid);
            uuid.is_some() && uuid == wish.domain.as_ref() && machine.record.process != process
        };
        let older = self.machines.iter().find(|(_, machine)| is_older(machine));
        if let Some(id) = older.map(|(id, _)| *id)
            && let Some(machine) = self.machines.remove(&id)
        {
            self.bury(machine.record);
        }
    }

    fn taken(&self, name: &str) -> String {
        format!("there is a machine `{name}` already; choose another name")
    }

    fn forget_who_is_gone(&mut self) {
        self.waiting.retain(|waiting| waiting.process.is_alive());
        let replace_after = self.settings.replace_after;
        self.evicted.retain(|_, (_, at)| at.elapsed() < replace_after);
        self.gave_way.retain(|one| one.at.elapsed() < GAVE_WAY_FOR);
        let ended = self.machines.iter().filter(|(_, machine)| machine.has_ended());
        let ended: Vec<VmId> = ended.map(|(id, _)| *id).collect();
        for id in ended {
            if let Some(machine) = self.machines.remove(&id) {
                self.bury(machine.record);
            }
        }
    }

    /// Forgets a machine that has ended, but for why it has if that was for others.
    fn bury(&mut self, record: Record) {
        // The group first: without a record nobody would look for it.
        record.cgroup.iter().for_each(|path| container::remove(path));
        self.directory.remove(&record);
        if record.gives_way {
            if self.gave_way.len() == MAX_GAVE_WAY {
                self.gave_way.pop_front();
            }
            let (name, pid) = (record.name, record.process.pid);
            self.gave_way.push_back(GaveWay { name, pid, at: Instant::now() });
        }
    }

    /// Writes down whether a machine is to end for others, before it is told so.
    fn gives_way(&mut self, vm: VmId, gives_way: bool) {
        let Some(machine) = self.machines.get_mut(&vm) else { return };
        if std::mem::replace(&mut machine.record.gives_way, gives_way) != gives_way
            && let Err(error) = self.directory.write(&machine.record)
        {
            tracing::warn!(vm = machine.record.name, %error, "that it is to end for others is not written down");
        }
    }

    /// The host as the broker is told of it.
    fn look(&mut self, donors: &[DonorReport], now: Duration) -> Host {
        self.machines.values_mut().for_each(Machine::look_into_memory);
        let places = Places(&self.nodes);
        let mut machines_have = vec![0u64; self.nodes.len()];
        for machine in self.machines.values() {
            for (node, bytes) in machine.in_use_by_node(places) {
                machines_have[node] += bytes;
            }
        }
        let totals = self.totals();
        let managed = managed(&totals, self.manage_bytes);
        let mut nodes = Vec::new();
        for at in 0..self.nodes.len() {
            let memory = self.memory.iter().find(|memory| memory.node == self.nodes[at]);
            let in_use = memory
                .map_or(0, |node| node.total_bytes - node.available_bytes.min(node.total_bytes));
            let donors = lending(donors, at, places);
            // Lent memory is resident on the NUMA node that its donor is bound to.
            let ours = machines_have[at] + committed_bytes(&donors);
            let other = self.other_use[at].note(totals[at], in_use.saturating_sub(ours), now);
            nodes.push(NumaNode {
                total_bytes: managed[at],
                system_bytes: other.saturating_sub(totals[at] - managed[at]),
                lend_cap_bytes: donors.iter().map(|donor| donor.lend_bytes).sum(),
                lent: self.lending[at].look(&donors),
                ephemeral: Elastic { done: self.lending[at].ephemeral_done, ..Elastic::default() },
            });
        }
        let vms = self.machines.iter().map(|(id, machine)| machine.look(*id, places)).collect();
        let waiting = self.waiting.iter().map(|waiting| waiting.newcomer).collect();
        Host { nodes, cores: self.cores.managed(), vms, waiting }
    }

    /// Total bytes of each node; 0 for a node that is offline now.
    fn totals(&self) -> Vec<u64> {
        let total = |number: &u32| {
            let memory = self.memory.iter().find(|memory| memory.node == *number);
            memory.map_or(0, |memory| memory.total_bytes)
        };
        self.nodes.iter().map(total).collect()
    }

    fn carry_out(&mut self, action: Action, node: &Inner, donors: &[DonorReport]) {
        match action {
            Action::Admit { vm, base_bytes } => self.admit(vm, &base_bytes),
            Action::Refuse { vm, why } => {
                if let Some(waiting) = self.leave_queue(vm) {
                    let _ = waiting.answer.send(Err(why.to_string()));
                }
            }
            Action::Grow { vm, node, requested_bytes, order } => {
                if let Some((machine, device)) = self.device(vm, node) {
                    machine.grow(device, requested_bytes, order);
                }
            }
            Action::Shrink { vm, node, requested_bytes, target_bytes, order } => {
                if let Some((machine, device)) = self.device(vm, node) {
                    machine.shrink(device, requested_bytes, target_bytes, order);
                }
            }
            Action::Lend { node: at, limit_bytes, order }
            | Action::Recall { node: at, limit_bytes, order } => {
                let donors = lending(donors, at, Places(&self.nodes));
                let parts = divide(limit_bytes, &lenders(&donors));
                for (donor, part) in donors.iter().zip(&parts) {
                    node.set_host_limit(&donor.name, *part);
                }
                self.lending[at].ordered = Some((order, limit_bytes, parts));
            }
            // There are no ephemeral pools: their limit is nothing, and stays so.
            Action::Ephemeral { node, order, .. } => self.lending[node].ephemeral_done = order,
            Action::Warn { vm, deadline } => {
                self.gives_way(vm, true);
                let name = self.name(vm);
                let left_s = deadline.saturating_sub(self.begun.elapsed()).as_secs();
                tracing::warn!(vm = name, left_s, "its minimum is needed for a regular VM");
                self.guest(vm).inspect(|guest| guest.warn(deadline));
            }
            Action::Spare { vm } => {
                self.gives_way(vm, false);
                tracing::info!(vm = self.name(vm), "its minimum is not needed");
                self.guest(vm).inspect(|guest| guest.spare());
            }
            Action::ShutDown { vm, .. } => {
                if let Some(machine) = self.machines.get_mut(&vm)
                    && !std::mem::replace(&mut machine.is_shutting_down, true)
                {
                    machine.monitor.iter().for_each(MachineMonitor::power_down);
                }
            }
            Action::Evict { vm, why } => {
                self.gives_way(vm, true);
                self.evict(vm, why);
            }
        }
    }

    /// Writes down that the machine is there, and tells its launcher.
    fn admit(&mut self, vm: VmId, base_bytes: &[u64]) {
        let Some(waiting) = self.leave_queue(vm) else { return };
        let Waiting { wish, process, since, was_passed_over, answer, .. } = waiting;
        let waited = if was_passed_over { since.elapsed() } else { Duration::ZERO };
        let max_bytes = match wish.kind {
            NewcomerKind::Harvest => wish.max_bytes,
            NewcomerKind::Regular | NewcomerKind::Spot => wish.bytes,
        };
        let node = self.nodes.iter().zip(base_bytes).find(|(_, bytes)| **bytes > 0);
        let host_node = node.map(|(node, _)| *node).filter(|_| self.nodes.len() > 1);
        let memory = match (wish.balloon, wish.container) {
            (true, _) => Memory::with_balloon(host_node, wish.bytes, max_bytes),
            (false, true) => Memory::of_container(host_node, wish.bytes, max_bytes),
            (false, false) => {
                let mut memory = Memory::plan(&self.nodes, base_bytes, max_bytes);
                if self.nodes.len() > 1 && wish.numa_node.is_some() {
                    // It grows there as well, and nowhere else.
                    memory.parts.retain(|part| part.host_node == wish.numa_node);
                }
                memory
            }
        };
        let cgroup = wish.container.then(|| self.place(&wish)).transpose();
        let cgroup = match cgroup {
            Ok(cgroup) => cgroup,
            Err(reason) => {
                let _ = answer.send(Err(reason));
                return;
            }
        };
        let record = Record {
            name: wish.name.clone(),
            kind: wish.kind,
            process,
            max_bytes,
            memory: memory.clone(),
            cores: wish.cores,
            gives_way: false,
            cgroup,
            domain: wish.domain.clone().map(|uuid| DomainRecord {
                uuid,
                guest_port: None,
                is_promised: true,
            }),
        };
        let entered = self.sockets(&wish).and_then(|(monitor, guest_port)| {
            let written = self.directory.write(&record);
            written.map_err(|error| {
                let dir = self.directory.path().display();
                format!("what it is cannot be written to {dir}: {error}; it is not admitted")
            })?;
            // Left by one of this name that was killed: nobody listens there.
            for socket in guest_port.iter().chain([&monitor]) {
                let _ = std::fs::remove_file(socket);
            }
            let entered = self.enter(record.clone(), Some(waited), Vec::new());
            let entered = entered.and_then(|id| self.take_in(id));
            entered.inspect_err(|_| self.bury(record))?;
            // Its launcher, and all that it will be.
            self.cores.keep(&mut self.machines);
            Ok(Admitted { memory, monitor, guest_port })
        });
        let _ = answer.send(entered);
    }

    /// Where a container's group is to be.
    fn place(&self, wish: &CreateVm) -> Result<PathBuf, String> {
        Container::place(&wish.name, (wish.cores > 0).then_some(&self.cores))
    }

    /// Has a container's launcher enter it. It is none if it cannot.
    fn take_in(&mut self, vm: VmId) -> Result<(), String> {
        let Some(machine) = self.machines.get(&vm) else { return Ok(()) };
        let taken = machine
            .container
            .iter()
            .try_for_each(|container| container.take_in(machine.record.process));
        taken.inspect_err(|_| drop(self.machines.remove(&vm)))
    }

    fn leave_queue(&mut self, vm: VmId) -> Option<Waiting> {
        let at = self.waiting.iter().position(|waiting| waiting.newcomer.id == vm)?;
        Some(self.waiting.remove(at))
    }

    fn evict(&mut self, vm: VmId, why: EvictWhy) {
        let Some(machine) = self.machines.get_mut(&vm) else { return };
        let name = &machine.record.name;
        match machine.evicted {
            None => {
                tracing::warn!(vm = name, "it is evicted: {why}");
                let now = Instant::now();
                machine.evicted = Some(now);
                self.evicted.insert(name.clone(), (vm, now));
                machine.monitor.iter().for_each(MachineMonitor::quit);
            }
            Some(since) if since.elapsed() > QUIT_PATIENCE => machine.kill(),
            Some(_) => {}
        }
    }

    /// A machine, and its device on a node.
    fn device(&mut self, vm: VmId, node: NodeNo) -> Option<(&mut Machine, String)> {
        let machine = self.machines.get_mut(&vm)?;
        let part = machine.part_on(node, Places(&self.nodes))?;
        Some((machine, Memory::device_id(part)))
    }

    fn guest(&self, vm: VmId) -> Option<&GuestLink> {
        self.machines.get(&vm)?.guest.as_ref()
    }

    fn name(&self, vm: VmId) -> &str {
        self.machines.get(&vm).map_or("", |machine| &machine.record.name)
    }

    /// Additional harvest VMs if the cluster's quota allowed: those that have their place and wait
    /// for memory, and one that waits only for the quota.
    fn wanted_harvest_vms(&self) -> u64 {
        let is_harvest = |id: VmId| {
            let waiting = self.waiting.iter().find(|waiting| waiting.newcomer.id == id);
            waiting.is_some_and(|waiting| waiting.newcomer.kind == NewcomerKind::Harvest)
        };
        let waits = self.broker.waiting().filter(|(id, ..)| is_harvest(*id));
        let waits: Vec<Waits> = waits.map(|(_, _, waits)| waits).collect();
        let placed = waits.iter().filter(|waits| matches!(waits, Waits::ForMemory { .. })).count();
        let kinds = self.machines.values().map(|machine| machine.record.kind);
        let there = kinds.filter(|kind| *kind == NewcomerKind::Harvest).count();
        let may_have_more = there + placed < self.settings.harvest_quota;
        (placed + usize::from(may_have_more && waits.contains(&Waits::ForQuota))) as u64
    }

    fn report(&self, word: HarvestWord) -> AgentReport {
        let ledgers = &self.broker.ledger().nodes;
        let nodes = self.nodes.iter().zip(self.totals()).zip(ledgers);
        let nodes = nodes.map(|((node, host_bytes), ledger)| NodeMemoryReport {
            node: *node,
            host_bytes,
            unmanaged_bytes: host_bytes.saturating_sub(ledger.total_bytes),
            ledger: *ledger,
        });
        let warned: BTreeMap<VmId, Duration> = self.broker.warned().collect();
        let mut machines: Vec<MachineReport> = self
            .machines
            .iter()
            .map(|(id, machine)| machine.report(warned.contains_key(id)))
            .collect();
        machines.sort_by(|a, b| a.name.cmp(&b.name));
        let states: BTreeMap<_, _> =
            self.broker.waiting().map(|(id, _, waits)| (id, waits)).collect();
        let waiting = self.waiting.iter().map(|waiting| NewcomerReport {
            name: waiting.wish.name.clone(),
            kind: waiting.wish.kind,
            bytes: waiting.newcomer.bytes,
            cores: waiting.newcomer.cores,
            waiting_ms: u64::try_from(waiting.since.elapsed().as_millis()).unwrap_or(u64::MAX),
            waits: states.get(&waiting.newcomer.id).copied(),
        });
        let gave_way = self.gave_way.iter().map(|one| GaveWayReport {
            name: one.name.clone(),
            pid: one.pid,
            since_ms: u64::try_from(one.at.elapsed().as_millis()).unwrap_or(u64::MAX),
        });
        AgentReport {
            qmp_dir: self.directory.path().to_owned(),
            buffer_bytes: self.settings.buffer_bytes,
            nodes: nodes.collect(),
            cores: self.cores.report(self.broker.ledger().cores),
            machines,
            waiting: waiting.collect(),
            gave_way: gave_way.collect(),
            counters: *self.broker.counters(),
            harvest: HarvestShare { word, wanted: self.wanted_harvest_vms() },
            libvirt: self.domains.as_ref().map(|domains| LibvirtReport {
                uri: domains.virsh().uri().to_owned(),
                failure: domains.failure(),
            }),
        }
    }
}

/// Outcome of one arrival.
enum Received {
    /// It was admitted already.
    IsThere(Admitted),
    /// It waits already, at this place.
    Waits(usize),
    /// It is new.
    Comes(Newcomer),
}
