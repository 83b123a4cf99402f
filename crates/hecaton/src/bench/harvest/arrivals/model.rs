//! The hour at full size, without guests: the broker decides as it does for the agent, and a
//! harvest VM gives at a rate that was measured. Time is a simulated clock's.

use super::trace::{Hour, MIN_GIB, SECONDS};
use anyhow::{bail, ensure};
use hecaton_broker::{
    Action, Broker, Device, Harvest, Host, Newcomer, NewcomerKind, NumaNode, Settings, Vm, VmId,
};
use hecaton_vm::create::BLOCK_BYTES;
use std::time::Duration;

/// As fine as time is.
const TICK: Duration = Duration::from_millis(50);

/// How often an agent looks, and how often while somebody waits.
const QUIET: Duration = Duration::from_secs(1);
const BUSY: Duration = Duration::from_millis(250);

/// How long a harvest VM has for what is there before the hour begins.
const BEFORE_S: f64 = 300.0;

/// After the hour, for those that wait still.
const AFTER_S: f64 = 600.0;

const HARVEST_VM: VmId = VmId(0);

const GIB: f64 = (1 << 30) as f64;

/// Result of an hour.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    /// How long each regular VM that came has waited, in seconds.
    pub(super) delays_s: Vec<f64>,
    /// Average memory of the harvest VM beyond its minimum.
    pub(super) harvested_gib: f64,
}

/// Replays it with such a buffer; the harvest VM gives so many bytes a second, and takes them at
/// once.
pub(super) fn replay(hour: &Hour, buffer_gib: f64, rate_bytes_s: f64) -> anyhow::Result<Outcome> {
    let settings = Settings {
        buffer_bytes: whole(buffer_gib),
        // The model measures waiting times: the patience is so long that no VM is evicted.
        patience: Duration::from_secs(3600),
        reclaim_time: Duration::from_secs(3600),
        ..Settings::default()
    };
    let mut model = Model {
        broker: Broker::new(settings)?,
        host: host(hour),
        rate_bytes_s,
        given_bytes: 0.0,
        arrived: vec![None; hour.machines.len()],
        delays_s: Vec::new(),
        clock: Duration::ZERO,
    };
    let start = Duration::from_secs_f64(BEFORE_S);
    let mut looked: Option<Duration> = None;
    let mut harvested = 0.0;
    let mut ticks = 0u32;
    loop {
        let second = model.clock.as_secs_f64() - BEFORE_S;
        let has_rung = model.come_and_go(hour, second);
        let interval = if model.host.waiting.is_empty() { QUIET } else { BUSY };
        if has_rung || looked.is_none_or(|looked| model.clock >= looked + interval) {
            model.step()?;
            looked = Some(model.clock);
        }
        if model.clock >= start && second < SECONDS {
            harvested += model.device().plugged_bytes as f64;
            ticks += 1;
        }
        if second >= SECONDS && model.host.waiting.is_empty() {
            break;
        }
        ensure!(
            second < SECONDS + AFTER_S,
            "a machine waits without end: {:?}",
            model.host.waiting
        );
        model.shrink();
        model.clock += TICK;
    }
    let harvested_gib = harvested / f64::from(ticks) / GIB;
    Ok(Outcome { delays_s: model.delays_s, harvested_gib })
}

struct Model {
    broker: Broker,
    host: Host,
    rate_bytes_s: f64,
    /// Bytes that the harvest VM has given towards its next whole block.
    given_bytes: f64,
    /// When each of the hour's machines came, of those that have not left.
    arrived: Vec<Option<Duration>>,
    delays_s: Vec<f64>,
    clock: Duration,
}

/// Names of the hour's machines.
fn id(at: usize) -> VmId {
    VmId(1 + at as u64)
}

/// In whole blocks.
fn whole(gib: f64) -> u64 {
    ((gib * GIB) as u64).next_multiple_of(BLOCK_BYTES)
}

fn host(hour: &Hour) -> Host {
    let total_bytes = (hour.left_gib() * GIB) as u64;
    let most = total_bytes / BLOCK_BYTES * BLOCK_BYTES;
    let device = Device {
        node: 0,
        block_bytes: BLOCK_BYTES,
        max_bytes: most - whole(MIN_GIB),
        requested_bytes: 0,
        plugged_bytes: 0,
        held_bytes: vec![0],
        scattered_bytes: 0,
        done: Default::default(),
        is_heard: true,
    };
    let harvest = Some(Harvest { max_bytes: most, devices: vec![device] });
    let harvest_vm = Vm { id: HARVEST_VM, base_bytes: vec![whole(MIN_GIB)], cores: 0, harvest };
    let there = hour.machines.iter().enumerate().filter(|(_, one)| one.arrives_s.is_none());
    let there = there.map(|(at, one)| Vm {
        id: id(at),
        base_bytes: vec![whole(one.gib)],
        cores: 0,
        harvest: None,
    });
    let vms = std::iter::once(harvest_vm).chain(there).collect();
    let node = NumaNode { total_bytes, ..NumaNode::default() };
    Host { nodes: vec![node], cores: 0, vms, waiting: Vec::new() }
}

impl Model {
    /// Those whose time it is; whether one has come, whom the agent hears of at once.
    fn come_and_go(&mut self, hour: &Hour, second: f64) -> bool {
        let mut has_rung = false;
        for (at, machine) in hour.machines.iter().enumerate() {
            let is_due = machine.arrives_s.is_some_and(|arrives| second >= arrives);
            if is_due && self.arrived[at].is_none() {
                self.arrived[at] = Some(self.clock);
                let (kind, bytes) = (NewcomerKind::Regular, whole(machine.gib));
                self.host.waiting.push(Newcomer { id: id(at), kind, bytes, cores: 0, node: None });
                has_rung = true;
            }
            if machine.leaves_s.is_some_and(|leaves| second >= leaves) {
                self.host.vms.retain(|vm| vm.id != id(at));
            }
        }
        has_rung
    }

    fn step(&mut self) -> anyhow::Result<()> {
        for action in self.broker.step(&self.host, self.clock) {
            match action {
                Action::Admit { vm, base_bytes } => self.admit(vm, base_bytes),
                Action::Grow { requested_bytes, order, .. }
                | Action::Shrink { requested_bytes, order, .. } => {
                    let device = self.device();
                    device.requested_bytes = requested_bytes;
                    device.done = order;
                    // Growing is much faster than giving.
                    let plugged = device.plugged_bytes.max(requested_bytes);
                    set_plugged(device, plugged);
                }
                // Nothing is lent, and there is room for all at any time.
                other => bail!("the broker wants {other:?}"),
            }
        }
        Ok(())
    }

    fn admit(&mut self, vm: VmId, base_bytes: Vec<u64>) {
        self.host.waiting.retain(|newcomer| newcomer.id != vm);
        self.host.vms.push(Vm { id: vm, base_bytes, cores: 0, harvest: None });
        let arrived = self.arrived[vm.0 as usize - 1].unwrap_or(self.clock);
        self.delays_s.push((self.clock - arrived).as_secs_f64());
    }

    /// In whole blocks: what is less than one counts for the next time.
    fn shrink(&mut self) {
        self.given_bytes += self.rate_bytes_s * TICK.as_secs_f64();
        let bytes = self.given_bytes as u64 / BLOCK_BYTES * BLOCK_BYTES;
        self.given_bytes -= bytes as f64;
        let device = self.device();
        let owed = device.plugged_bytes.saturating_sub(device.requested_bytes);
        let plugged = device.plugged_bytes - bytes.min(owed);
        set_plugged(device, plugged);
        if owed == 0 {
            self.given_bytes = 0.0;
        }
    }

    fn device(&mut self) -> &mut Device {
        let vm = self.host.vms.iter_mut().find(|vm| vm.id == HARVEST_VM);
        let harvest = vm.and_then(|vm| vm.harvest.as_mut());
        &mut harvest.expect("nobody evicts the harvest VM").devices[0]
    }
}

/// Sets the size that the guest reports for a device, and the size that the host finds.
fn set_plugged(device: &mut Device, bytes: u64) {
    device.plugged_bytes = bytes;
    device.held_bytes = vec![bytes];
}

#[cfg(test)]
mod tests {
    use super::super::trace::Regular;
    use super::*;

    const RATE: f64 = 1.0 * GIB;

    fn hour(machines: &[(f64, Option<f64>, f64)]) -> Hour {
        let machine = |&(arrives, leaves_s, gib): &(f64, Option<f64>, f64)| Regular {
            arrives_s: Some(arrives).filter(|second| *second > 0.0),
            leaves_s,
            gib,
        };
        Hour { staying_gib: 248.0, machines: machines.iter().map(machine).collect() }
    }

    #[test]
    fn without_a_buffer_a_machine_waits_as_long_as_its_memory_takes() {
        let outcome = replay(&hour(&[(100.0, None, 16.0)]), 0.0, RATE).unwrap();
        let [delay] = outcome.delays_s[..] else { panic!("{outcome:?}") };
        // Batches of 1 GiB, the end of each of which is seen a quarter of a second late at most.
        assert!((16.0..=20.5).contains(&delay), "{delay}");
    }

    #[test]
    fn what_is_beyond_the_buffer_is_waited_for() {
        let outcome = replay(&hour(&[(100.0, None, 16.0)]), 8.0, RATE).unwrap();
        assert!((8.0..=10.5).contains(&outcome.delays_s[0]), "{outcome:?}");
    }

    #[test]
    fn with_a_buffer_that_suffices_nobody_waits_and_less_is_harvested() {
        // The second one comes when the buffer is full again.
        let hour = hour(&[(100.0, None, 16.0), (200.0, Some(900.0), 16.0)]);
        let without = replay(&hour, 0.0, RATE).unwrap();
        let with = replay(&hour, 16.0, RATE).unwrap();
        assert_eq!(with.delays_s, [0.0, 0.0]);
        assert!(without.delays_s.iter().all(|delay| *delay > 10.0), "{without:?}");
        assert!((without.harvested_gib - with.harvested_gib - 16.0).abs() < 1.0);
    }

    #[test]
    fn one_that_leaves_makes_room() {
        let hour = hour(&[(0.0, Some(500.0), 100.0), (1000.0, None, 16.0)]);
        let outcome = replay(&hour, 16.0, RATE).unwrap();
        assert_eq!(outcome.delays_s, [0.0], "who is there from the start has not come");
        // 200 GiB, without both, the buffer and the minimum.
        assert!((120.0..150.0).contains(&outcome.harvested_gib), "{outcome:?}");
    }
}
