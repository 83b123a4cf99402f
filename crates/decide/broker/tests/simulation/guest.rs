//! A harvest VM's guest: one that does as it is asked, and those that do not.

use crate::{BLOCK, Dice};
use hecaton_broker::{Device, NodeNo, Order, Vm, VmId};

/// How a guest answers when it is asked for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mood {
    /// Gives what it is asked for, many blocks a tick.
    Good,
    /// A block now and then.
    Slow,
    /// Nothing.
    Hung,
    /// Says that it gave, and keeps the memory.
    Liar,
    /// Gives in pieces.
    Scatters,
}

/// A device as it is, and not as anybody was told.
#[derive(Clone, Debug)]
pub(crate) struct Plug {
    pub(crate) node: NodeNo,
    pub(crate) block: u64,
    pub(crate) max: u64,
    pub(crate) requested: u64,
    pub(crate) plugged: u64,
    /// Bytes that are really in the host's memory, on each node.
    pub(crate) resident: Vec<u64>,
    pub(crate) scattered: u64,
    pub(crate) done: Order,
    /// An order on its way, and when it arrives.
    pub(crate) on_its_way: Option<(Order, u64, u64)>,
    /// Last answer of the monitor: bytes requested, plugged and scattered, and the order done.
    said: (u64, u64, u64, Order),
}

#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) id: VmId,
    pub(crate) base: Vec<u64>,
    pub(crate) cores: u32,
    pub(crate) max: u64,
    pub(crate) plugs: Vec<Plug>,
    pub(crate) mood: Mood,
    /// The monitor answers nothing until then.
    pub(crate) deaf_until: u64,
    /// The guest boots until then, and does nothing.
    pub(crate) boots_until: u64,
    /// It was anything but good at some time, or its monitor was silent.
    pub(crate) is_to_blame: bool,
    /// The host has killed it, or it shuts down: gone at that tick.
    pub(crate) ends_at: Option<u64>,
}

impl Guest {
    pub(crate) fn new(
        id: VmId,
        base: Vec<u64>,
        cores: u32,
        more: u64,
        now: u64,
        dice: &mut Dice,
    ) -> Guest {
        let nodes = base.len();
        let plug = |node| Plug {
            node,
            block: BLOCK << (node as u64 % 2),
            max: more / (2 * BLOCK) * (2 * BLOCK),
            requested: 0,
            plugged: 0,
            resident: vec![0; nodes],
            scattered: 0,
            done: Order(0),
            on_its_way: None,
            said: (0, 0, 0, Order(0)),
        };
        let mut guest = Guest {
            id,
            max: base.iter().sum::<u64>() + more,
            base,
            cores,
            plugs: (0..nodes).map(plug).collect(),
            mood: Mood::Good,
            deaf_until: 0,
            boots_until: now + dice.below(20),
            is_to_blame: false,
            ends_at: None,
        };
        if dice.permille(400) {
            guest.turn(dice);
        }
        guest
    }

    /// Into one that does not as it is asked.
    pub(crate) fn turn(&mut self, dice: &mut Dice) {
        let moods = [Mood::Slow, Mood::Hung, Mood::Liar, Mood::Scatters];
        self.mood = moods[dice.below(4) as usize];
        self.is_to_blame = true;
    }

    /// All is forgotten by a reboot, but what was asked for.
    pub(crate) fn reboot(&mut self, now: u64) {
        for plug in &mut self.plugs {
            plug.plugged = 0;
            plug.scattered = 0;
            plug.resident.iter_mut().for_each(|bytes| *bytes = 0);
        }
        self.boots_until = now + 20;
    }

    pub(crate) fn tick(&mut self, now: u64, dice: &mut Dice) {
        if now >= self.deaf_until {
            for plug in &mut self.plugs {
                if let Some((order, bytes, _)) = plug.on_its_way.filter(|(.., at)| now >= *at) {
                    plug.requested = bytes;
                    plug.done = order;
                    plug.on_its_way = None;
                }
            }
        }
        if now < self.boots_until {
            return;
        }
        let mood = self.mood;
        for plug in &mut self.plugs {
            let blocks = match mood {
                Mood::Slow => u64::from(now.is_multiple_of(4)),
                Mood::Hung => 0,
                Mood::Good | Mood::Liar | Mood::Scatters => 8 + dice.below(8),
            };
            plug.move_to_requested(blocks * plug.block, mood);
        }
    }

    /// The VM as the host sees it: the monitor's last answer, and the bytes in memory.
    pub(crate) fn seen(&mut self, now: u64) -> Vm {
        let is_heard = now >= self.deaf_until;
        let device = |plug: &mut Plug| {
            if is_heard {
                plug.said = (plug.requested, plug.plugged, plug.scattered, plug.done);
            }
            let (requested_bytes, plugged_bytes, scattered_bytes, done) = plug.said;
            let mut held_bytes = plug.resident.clone();
            let held = held_bytes.iter().sum::<u64>();
            held_bytes[plug.node] += plugged_bytes.saturating_sub(held);
            Device {
                node: plug.node,
                block_bytes: plug.block,
                max_bytes: plug.max,
                requested_bytes,
                plugged_bytes,
                held_bytes,
                scattered_bytes,
                done,
                is_heard,
            }
        };
        let devices = self.plugs.iter_mut().map(device).collect();
        let harvest = hecaton_broker::Harvest { max_bytes: self.max, devices };
        Vm { id: self.id, base_bytes: self.base.clone(), cores: self.cores, harvest: Some(harvest) }
    }

    /// The agent was killed, and its sent orders are done or not. Until the monitor answers, the
    /// next agent goes by a record that was written before each order was sent.
    pub(crate) fn agent_ended(&mut self, dice: &mut Dice) {
        for plug in &mut self.plugs {
            let mut recorded = plug.requested.max(plug.said.0);
            if let Some((_, bytes, _)) = plug.on_its_way.take() {
                recorded = recorded.max(bytes);
                if dice.below(2) == 0 {
                    plug.requested = bytes;
                }
            }
            plug.done = Order(0);
            plug.said = (recorded, plug.plugged.max(plug.said.1), plug.said.2, Order(0));
        }
    }

    pub(crate) fn resident(&self, node: NodeNo) -> u64 {
        let of =
            |plug: &Plug| plug.resident[node] + if plug.node == node { plug.scattered } else { 0 };
        self.base[node] + self.plugs.iter().map(of).sum::<u64>()
    }
}

impl Plug {
    fn move_to_requested(&mut self, most: u64, mood: Mood) {
        if self.plugged < self.requested {
            self.plugged += most.min(self.requested - self.plugged);
            let resident: u64 = self.resident.iter().sum();
            self.resident[self.node] += self.plugged.saturating_sub(resident);
            return;
        }
        let less = most.min(self.plugged - self.requested);
        self.plugged -= less;
        if mood == Mood::Liar {
            return;
        }
        let mut left = less;
        let own = self.node;
        let order = std::iter::once(own).chain((0..self.resident.len()).filter(|n| *n != own));
        for node in order {
            let given = left.min(self.resident[node]);
            self.resident[node] -= given;
            left -= given;
            if mood == Mood::Scatters && node == own {
                self.scattered += given;
            }
        }
    }
}
