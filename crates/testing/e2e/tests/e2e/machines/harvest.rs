//! Harvest VMs: stock QEMU whose guest grows and shrinks through virtio-mem, on each of its NUMA
//! nodes.
//!
//! The guests are emulated, so the tests print durations and do not judge them. The size that a
//! guest sees and the size that QEMU reports change one after the other. So a guest ends when the
//! test tells it to, and not at a size that it sees.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE},
    guest::{GUEST_PATIENCE, Guests, Machine, Qemu, Spec},
    wait::until_every,
};
use anyhow::{Context as _, bail, ensure};
use hecaton_broker::{
    Action, Broker, Device, Harvest, Host, Newcomer, NewcomerKind, NumaNode, Order, Settings, Vm,
    VmId,
};
use hecaton_vm::{
    memory_device::{MemoryDevice, ResizeError},
    qmp::Monitor,
};
use serde_json::json;
use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    time::{Duration, Instant},
};

const M: u64 = 1 << 20;

/// Two nodes with 256 MiB each, which can have 512 and 384 MiB more.
const TWO_NODES: &[&str] = &[
    "-no-reboot",
    "-m",
    "size=512M,maxmem=4G",
    "-object",
    "memory-backend-memfd,id=base0,size=256M,share=on",
    "-object",
    "memory-backend-memfd,id=base1,size=256M,share=on",
    "-numa",
    "node,nodeid=0,memdev=base0,cpus=0",
    "-numa",
    "node,nodeid=1,memdev=base1",
    "-object",
    "memory-backend-memfd,id=more0,size=512M,share=on",
    "-object",
    "memory-backend-memfd,id=more1,size=384M,share=on",
    "-device",
    "virtio-mem-pci,id=vm0,memdev=more0,node=0,block-size=2M,requested-size=0",
    "-device",
    "virtio-mem-pci,id=vm1,memdev=more1,node=1,block-size=2M,requested-size=0",
];

/// Makes plugged memory movable, and defines shell functions. `until_has NODE gt|lt MIB` waits
/// until a node has more or less memory. `told` waits for a line from the test. `told` starts no
/// process, because a full guest may have no memory for one.
const PRELUDE: &str = "echo online_movable > /sys/devices/system/memory/auto_online_blocks
    has() { awk '/MemTotal/ {print int($4/1024)}' /sys/devices/system/node/node$1/meminfo; }
    until_has() { while ! [ $(has $1) -$2 $3 ]; do sleep 1; done; echo guest: node $1 has $(has $1); }
    told() { read -r word </dev/ttyS0; }
";

fn device(monitor: &mut Monitor, id: &str) -> anyhow::Result<MemoryDevice> {
    let devices = monitor.memory_devices(PATIENCE)?;
    let device = devices.into_iter().find(|device| device.id == id);
    device.with_context(|| format!("QEMU lists no `{id}`"))
}

/// Asks for a size, polls until the guest has it, and prints how fast that was.
fn resize(
    machine: &mut Machine,
    monitor: &mut Monitor,
    id: &str,
    bytes: u64,
) -> anyhow::Result<()> {
    machine.explained(comes_to_size(monitor, id, bytes))
}

fn comes_to_size(monitor: &mut Monitor, id: &str, bytes: u64) -> anyhow::Result<()> {
    let before = device(monitor, id)?.plugged_bytes;
    monitor.request_size(id, bytes, PATIENCE)?;
    let asked = Instant::now();
    let what = format!("{id} has {} MiB", bytes / M);
    until_every(Duration::from_millis(20), &what, GUEST_PATIENCE, || {
        let now = device(monitor, id)?;
        ensure!(now.requested_bytes == bytes, "{now:?}");
        Ok(if now.plugged_bytes == bytes { Ok(()) } else { Err(format!("{now:?}")) })
    })?;
    let took = asked.elapsed();
    let mib = before.abs_diff(bytes) / M;
    println!(
        "    {id}: {} to {} MiB in {:.2} s, {:.0} MiB/s",
        before / M,
        bytes / M,
        took.as_secs_f64(),
        mib as f64 / took.as_secs_f64()
    );
    Ok(())
}

/// Between two looks at a host or a guest that changes all the time.
const TICK: Duration = Duration::from_millis(50);

/// Returns how many bytes of this host's memory all of QEMU's memory files take.
fn host_bytes(monitor: &Monitor) -> anyhow::Result<u64> {
    Ok(memory_files(monitor)?.iter().map(|(_, bytes)| bytes).sum())
}

/// QEMU's memory files: how large each is, and what of it is in memory.
fn memory_files(monitor: &Monitor) -> anyhow::Result<Vec<(u64, u64)>> {
    let pid = monitor.peer_pid().context("QEMU is in another process namespace")?;
    let mut files = Vec::new();
    let mut seen = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let is_memory = fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:memory-backend"));
        if is_memory {
            let file = fs::metadata(&path)?;
            if !seen.contains(&file.ino()) {
                seen.push(file.ino());
                files.push((file.len(), file.blocks() * 512));
            }
        }
    }
    Ok(files)
}

/// The guest has 1280 MiB, and fills this much of them.
const FILLED_MIB: u64 = 850;

fn grows_and_shrinks(cluster: &Cluster, guests: &Guests, qemu: Qemu) -> TestResult {
    let script = format!(
        "{PRELUDE} echo guest: waits
        until_has 0 gt 600; until_has 1 gt 400
        mount -o remount,size=1000M /tmp
        dd if=/dev/zero of=/tmp/filled bs=1M count={FILLED_MIB} 2>/dev/null || exit 1
        rm /tmp/filled
        stress-ng --vm 2 --vm-bytes 600M --verify -t 8 || exit 1
        echo guest: used
        until_has 1 lt 300; until_has 0 lt 400
        stress-ng --vm 1 --vm-bytes 150M --verify -t 5 || exit 1
        told"
    );
    let spec = Spec { script: &script, qemu, arguments: TWO_NODES, ..Spec::default() };
    let mut machine = Machine::start_with_its_memory(cluster, guests, &spec)?;
    machine.wait_for("guest: waits")?;
    let mut monitor = machine.monitor()?;
    let expected = |id: &str, backend: &str, guest_node, max_bytes| MemoryDevice {
        id: id.into(),
        backend: backend.into(),
        guest_node,
        block_bytes: 2 * M,
        max_bytes,
        requested_bytes: 0,
        plugged_bytes: 0,
    };
    let devices = monitor.memory_devices(PATIENCE)?;
    let both = [expected("vm0", "more0", 0, 512 * M), expected("vm1", "more1", 1, 384 * M)];
    ensure!(devices == both, "{devices:?}");

    // An impossible size is refused with a clear error, and the guest is not asked.
    let error = monitor.request_size("vm0", 3 * M, PATIENCE).expect_err("half a block");
    ensure!(matches!(error, ResizeError::NoBlocks { .. }), "{error}");
    let error = monitor.request_size("vm0", 514 * M, PATIENCE).expect_err("too large");
    ensure!(matches!(error, ResizeError::TooLarge { .. }), "{error}");
    ensure!(device(&mut monitor, "vm0")?.requested_bytes == 0, "it was asked for all that");

    resize(&mut machine, &mut monitor, "vm0", 512 * M)?;
    resize(&mut machine, &mut monitor, "vm1", 256 * M)?;
    machine.wait_for("guest: used")?;
    let used = host_bytes(&monitor)?;
    // From the node that is named, and from no other.
    resize(&mut machine, &mut monitor, "vm1", 0)?;
    ensure!(device(&mut monitor, "vm0")?.plugged_bytes == 512 * M, "the other node gave as well");
    // Not a page of it is left to be read by whoever has the memory next: the kernel gives out
    // zeroed ones.
    let files = memory_files(&monitor)?;
    ensure!(files.contains(&(384 * M, 0)), "what was given back is still in memory: {files:?}");
    machine.wait_for("guest: node 1 has")?;
    resize(&mut machine, &mut monitor, "vm0", 64 * M)?;
    let left = host_bytes(&monitor)?;
    println!("    on this host: {} MiB before, {} MiB after", used / M, left / M);
    // The guest keeps 512 and 64 MiB. It had filled more, and the host has at least the rest back.
    let given_back = (FILLED_MIB - 512 - 64) * M;
    ensure!(
        left + given_back <= used,
        "{used} bytes before, {left} after: the host has too little back"
    );
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

pub(crate) fn a_guest_grows_and_shrinks(cluster: &Cluster, guests: &Guests) -> TestResult {
    grows_and_shrinks(cluster, guests, Qemu::Backports)
}

pub(crate) fn debians_own_qemu(cluster: &Cluster, guests: &Guests) -> TestResult {
    grows_and_shrinks(cluster, guests, Qemu::Installed)
}

/// A full guest cannot give what it is asked for. The device sizes show this while it lasts, and
/// the monitor answers. Once the memory is free, the guest goes on as soon as it is asked again.
///
/// To give a block, the guest's kernel moves what is in it elsewhere. In a full guest that takes
/// the last free page, until the kernel finds that it has to keep the block. Whoever wants a page
/// at that moment has a process killed. So memory of the kernel's own is reserved here.
pub(crate) fn a_guest_that_gives_nothing(cluster: &Cluster, guests: &Guests) -> TestResult {
    let script = format!(
        "{PRELUDE} echo 256 16 > /proc/sys/vm/lowmem_reserve_ratio
        echo 7 > /proc/sys/kernel/printk
        echo guest: waits
        until_has 0 gt 600; until_has 1 gt 500
        mount -o remount,size=1000M /tmp
        dd if=/dev/zero of=/tmp/full bs=1M count=900 2>/dev/null
        echo guest: full; told
        : >/tmp/full
        echo guest: empty
        until_has 0 lt 300; until_has 1 lt 300; told"
    );
    let spec = Spec { script: &script, arguments: TWO_NODES, ..Spec::default() };
    let mut machine = Machine::start_with_its_memory(cluster, guests, &spec)?;
    machine.wait_for("guest: waits")?;
    let mut monitor = machine.monitor()?;
    resize(&mut machine, &mut monitor, "vm0", 512 * M)?;
    resize(&mut machine, &mut monitor, "vm1", 384 * M)?;
    machine.wait_for("guest: full")?;
    for id in ["vm0", "vm1"] {
        machine.explained(monitor.request_size(id, 0, PATIENCE))?;
    }
    // It gives what it does not need; then nothing changes any more, and the request stands.
    let (mut kept, mut since) = (u64::MAX, Instant::now());
    until_every(TICK, "nothing changes for 10 s", GUEST_PATIENCE, || {
        let devices = machine.explained(monitor.memory_devices(PATIENCE))?;
        ensure!(devices.iter().all(|device| device.requested_bytes == 0), "{devices:?}");
        let plugged = devices.iter().map(|device| device.plugged_bytes).sum();
        if plugged != kept {
            (kept, since) = (plugged, Instant::now());
        }
        let is_settled = since.elapsed() >= Duration::from_secs(10);
        Ok(if is_settled { Ok(()) } else { Err(format!("{} MiB are plugged", kept / M)) })
    })?;
    println!("    of 896 MiB the full guest kept {} MiB", kept / M);
    if kept <= 450 * M {
        return Err(machine.failed(format!("full, it has given {} MiB", 896 - kept / M)));
    }
    machine.say("")?;
    machine.wait_for("guest: empty")?;
    let emptied = Instant::now();
    // By itself its driver tries again after 50 s, and then less and less often. Asked for another
    // size it does at once: so the agent reminds those that have given late.
    for id in ["vm0", "vm1"] {
        for bytes in [2 * M, 0] {
            machine.explained(monitor.request_size(id, bytes, PATIENCE))?;
        }
    }
    let goes_on = until_every(TICK, "it gives all of it back", GUEST_PATIENCE, || {
        let devices = monitor.memory_devices(PATIENCE)?;
        let is_back = devices.iter().all(|device| device.plugged_bytes == 0);
        Ok(if is_back { Ok(()) } else { Err(format!("{devices:?}")) })
    });
    machine.explained(goes_on)?;
    println!("    given back {:.1} s after it was free", emptied.elapsed().as_secs_f64());
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// While the host takes memory, `hecaton guest` readies more of it, and uses it again when the host
/// has been silent.
pub(crate) fn what_is_readied_is_used_again(cluster: &Cluster, guests: &Guests) -> TestResult {
    let config = "pre-reclaim = '2G'\nreserve = '256M'\n[[application]]\nname = 'a'\nhook = { command = ['true'] }\n";
    let files = [("guest.toml", config)];
    let guests = guests.with(cluster.file("readies"), &cluster.hecaton, &files)?;
    let script = format!(
        "{PRELUDE} hecaton guest --config /guest.toml >/tmp/log 2>&1 &
        offline() {{ for file in /sys/devices/system/memory/memory*/state; do
            read -r state <$file; [ \"$state\" != offline ] || return 0
        done; return 1; }}
        echo guest: waits
        until_has 0 gt 700; sleep 2; echo guest: has grown
        until offline; do sleep 0.05; done; echo guest: readied
        while offline; do sleep 0.05; done; echo guest: used again
        until_has 0 gt 500; until_has 0 lt 660; told"
    );
    let arguments = &[
        "-no-reboot",
        "-m",
        "size=512M,maxmem=4G",
        "-object",
        "memory-backend-memfd,id=more,size=512M,share=on",
        "-device",
        "virtio-mem-pci,id=vm0,memdev=more,block-size=2M,requested-size=0",
    ];
    let spec = Spec { script: &script, arguments, ..Spec::default() };
    let mut machine = Machine::start_with_its_memory(cluster, &guests, &spec)?;
    machine.wait_for("guest: waits")?;
    let mut monitor = machine.monitor()?;
    resize(&mut machine, &mut monitor, "vm0", 512 * M)?;
    machine.wait_for("guest: has grown")?;
    resize(&mut machine, &mut monitor, "vm0", 256 * M)?;
    machine.wait_for("guest: readied")?;
    machine.wait_for("guest: used again")?;
    let plugged = machine.explained(device(&mut monitor, "vm0"))?.plugged_bytes;
    ensure!(plugged == 256 * M, "it gave what nobody asked for");
    machine.say("")?;
    machine.succeed()?;
    Ok(Outcome::Passed)
}

/// The paper's figure 5 at 1/128 of its sizes: the broker decides, and real guests give and take.
/// No agent is there yet; the test stands in for it.
pub(crate) fn figure_5(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut figure = Figure::start(cluster, guests)?;
    figure.until("t0: it has what is unallocated but for the buffer", 256)?;
    figure.regular.remove(&VmId(2));
    figure.until("t1: VM2 has left", 768)?;
    figure.come(3, 768);
    figure.until("t2: VM3 has come, and the buffer is full again", 0)?;
    ensure!(figure.regular.contains_key(&VmId(3)), "VM3 was not admitted");
    ensure!(figure.broker.ledger().nodes[0].buffer_bytes == 256 * M, "the buffer is not full");
    figure.come(4, 256);
    figure.step()?;
    ensure!(figure.regular.contains_key(&VmId(4)), "VM4 waits, and the buffer had what it needs");
    figure.come(5, 256);
    until_every(TICK, "t4: VM5 comes", GUEST_PATIENCE, || {
        if figure.regular.contains_key(&VmId(5)) {
            return Ok(Ok(()));
        }
        figure.step()?;
        Ok(Err(format!("{:?}", figure.broker)))
    })?;
    ensure!(figure.harvest.is_none(), "two have the same memory");
    let counters = figure.broker.counters();
    ensure!(counters.warned == 1 && counters.evicted.iter().sum::<u64>() <= 1, "{counters:?}");
    Ok(Outcome::Passed)
}

/// The host of figure 5: one node of 2 GiB, a buffer of 256 MiB.
struct Figure<'a> {
    cluster: &'a Cluster,
    guests: &'a Guests,
    begun: Instant,
    broker: Broker,
    /// The harvest VM, its monitor, and the last order that was carried out.
    harvest: Option<(Machine, Monitor, Order)>,
    regular: BTreeMap<VmId, (Machine, u64)>,
    waiting: Vec<Newcomer>,
}

const HARVEST: VmId = VmId(9);
const MINIMUM: u64 = 512 * M;
const DEVICE_MAX: u64 = 1536 * M;

impl<'a> Figure<'a> {
    fn start(cluster: &'a Cluster, guests: &'a Guests) -> anyhow::Result<Self> {
        let settings = Settings {
            buffer_bytes: 256 * M,
            batch_bytes: Some(128 * M),
            // Emulated guests on a busy machine are slow, and are not to be evicted for it.
            patience: GUEST_PATIENCE,
            reclaim_time: GUEST_PATIENCE,
            warning: Duration::from_secs(4),
            shut_down: Duration::from_secs(2),
            ..Settings::default()
        };
        let script = format!("{PRELUDE} echo guest: waits; sleep 3600");
        let arguments = &[
            "-no-reboot",
            "-m",
            "size=512M,maxmem=4G",
            "-object",
            "memory-backend-memfd,id=more,size=1536M,share=on",
            "-device",
            "virtio-mem-pci,id=vm0,memdev=more,block-size=2M,requested-size=0",
        ];
        let spec = Spec { name: "harvest", script: &script, arguments, ..Spec::default() };
        let mut machine = Machine::start_alone(cluster, guests, &spec)?;
        machine.wait_for("guest: waits")?;
        let monitor = machine.monitor()?;
        let mut figure = Figure {
            cluster,
            guests,
            begun: Instant::now(),
            broker: Broker::new(settings)?,
            harvest: Some((machine, monitor, Order::default())),
            regular: BTreeMap::new(),
            waiting: Vec::new(),
        };
        for vm in [1, 2] {
            figure.come(vm, 512);
        }
        Ok(figure)
    }

    fn come(&mut self, vm: u64, mib: u64) {
        let kind = NewcomerKind::Regular;
        self.waiting.push(Newcomer { id: VmId(vm), kind, bytes: mib * M, cores: 0, node: None });
    }

    /// Steps until the harvest VM has so many MiB beyond its minimum, and nobody waits.
    fn until(&mut self, what: &str, mib: u64) -> anyhow::Result<()> {
        let begun = Instant::now();
        until_every(TICK, what, GUEST_PATIENCE, || {
            let plugged = self.step()?;
            let is_full = self.broker.ledger().nodes[0].unassigned_bytes == 0;
            let is_so = plugged == mib * M && self.waiting.is_empty() && is_full;
            Ok(if is_so { Ok(()) } else { Err(format!("it has {} MiB", plugged / M)) })
        })?;
        println!("    {what}: {mib} MiB after {:.1} s", begun.elapsed().as_secs_f64());
        Ok(())
    }

    /// Takes a snapshot of the host and executes the broker's actions. Returns the bytes that the
    /// harvest VM has beyond its minimum.
    fn step(&mut self) -> anyhow::Result<u64> {
        let node = NumaNode { total_bytes: 2048 * M, ..NumaNode::default() };
        let regular = self.regular.iter().map(|(id, (_, bytes))| Vm {
            id: *id,
            base_bytes: vec![*bytes],
            cores: 0,
            harvest: None,
        });
        let mut vms: Vec<Vm> = regular.collect();
        let mut plugged = 0;
        if let Some((machine, monitor, done)) = &mut self.harvest {
            let device = machine.explained(device(monitor, "vm0"))?;
            let held = memory_files(monitor)?;
            let held = held.iter().find(|(size, _)| *size == DEVICE_MAX).context("no file")?.1;
            plugged = device.plugged_bytes;
            let device = Device {
                node: 0,
                block_bytes: device.block_bytes,
                max_bytes: device.max_bytes,
                requested_bytes: device.requested_bytes,
                plugged_bytes: plugged,
                held_bytes: vec![plugged.max(held)],
                scattered_bytes: 0,
                done: *done,
                is_heard: true,
            };
            let harvest = Harvest { max_bytes: MINIMUM + DEVICE_MAX, devices: vec![device] };
            let base_bytes = vec![MINIMUM];
            vms.push(Vm { id: HARVEST, base_bytes, cores: 0, harvest: Some(harvest) });
        }
        let host = Host { nodes: vec![node], cores: 0, vms, waiting: self.waiting.clone() };
        for action in self.broker.step(&host, self.begun.elapsed()) {
            self.carry_out(action)?;
        }
        let ledger = self.broker.ledger().nodes[0];
        ensure!(ledger.overdrawn_bytes == 0, "{ledger:?}");
        Ok(plugged)
    }

    fn carry_out(&mut self, action: Action) -> anyhow::Result<()> {
        match action {
            Action::Admit { vm, .. } => {
                let at = self.waiting.iter().position(|newcomer| newcomer.id == vm);
                let newcomer = self.waiting.remove(at.context("nobody waits by that name")?);
                let (name, memory) = (format!("vm{}", vm.0), format!("{}M", newcomer.bytes / M));
                let spec = Spec { name: &name, memory: &memory, ..Spec::default() };
                let machine = Machine::start_alone(self.cluster, self.guests, &spec)?;
                self.regular.insert(vm, (machine, newcomer.bytes));
            }
            Action::Grow { requested_bytes, order, .. }
            | Action::Shrink { requested_bytes, order, .. } => {
                let (machine, monitor, done) = self.harvest.as_mut().context("it is gone")?;
                machine.explained(monitor.request_size("vm0", requested_bytes, PATIENCE))?;
                *done = order;
            }
            Action::ShutDown { .. } => {
                let (_, monitor, _) = self.harvest.as_mut().context("it is gone")?;
                monitor.execute("system_powerdown", json!({}), PATIENCE)?;
            }
            // The machine is killed with its guard.
            Action::Evict { .. } => self.harvest = None,
            Action::Warn { .. } => {}
            other => bail!("nothing of the kind is called for: {other:?}"),
        }
        Ok(())
    }
}
