//! A virtual machine that swaps to the pool, and beyond it to its node's disk.
//!
//! As in frontswap, a page that does not fit into the machine's RAM is *put*, and goes to the disk
//! when the put fails. A page that is wanted again is *got* from where it is. That frees its place,
//! and another page has to go out for it. A program touches the pages of its footprint evenly, so a
//! page is as likely to be wanted as any other. The pages in the pool are a fair sample of the
//! pages that are out. That is coarse: real programs have hot pages, which makes the first pool
//! pages worth more than the last.
//!
//! A program's time is its work, plus what it waits for. Reads wait for the pool or the disk. A
//! disk serves its node's machines in turn: a read takes longer by what the others and the writes
//! keep it busy, taken from the step before. Writes are done in the background.
//!
//! When a program ends, the pages that it had in the pool may stay there, dead and unnoticed, until
//! others are put in their place: "the VMs never flush, thus keeping the pages" (the paper's
//! section V-C).

use crate::cluster::ConsumerId;
use crate::cluster::account::Account;

/// Pages of a MiB.
pub const MIB: u64 = 256;

/// Seconds for a page from the pool that is in the node's own memory.
const LOCAL_S: f64 = 10e-6;

/// Seconds for a page from another node: 50 µs more, as the paper emulates (section IV).
const REMOTE_S: f64 = 60e-6;

/// Seconds of the disk for a page read: random, less what reading ahead saves.
const READ_S: f64 = 1e-3;

/// Seconds of the disk for a page written: in runs, and not waited for.
const WRITE_S: f64 = 0.2e-3;

/// Seconds of the disk for a page spilled: long runs.
const SPILL_S: f64 = 0.05e-3;

/// Next activity of a machine.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Phase {
    /// A program starts.
    Begin,
    /// It works.
    Work {
        /// Seconds that it takes with all of its memory at hand.
        work_s: f64,
        /// Pages that it uses at the end; it grows or shrinks to that evenly.
        footprint_pages: u64,
        /// Pages that it touches in a second of work, out of all that it uses.
        touches_per_s: f64,
    },
    /// It ends, and its memory is free.
    End,
    /// Nothing runs.
    Sleep {
        /// How long.
        seconds: f64,
    },
}

/// A program that has ended.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Run {
    /// When it began, in seconds.
    pub began_s: f64,
    /// How long it took.
    pub took_s: f64,
}

/// Load of a node's disk.
#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    /// Part of the last step that each machine kept it busy, from 0 up.
    busy: Vec<f64>,
    next: Vec<f64>,
    /// Part of this period that spilling keeps it busy.
    spilling: f64,
}

impl Disk {
    pub(super) fn new(machines: usize) -> Disk {
        Disk { busy: vec![0.0; machines], next: vec![0.0; machines], spilling: 0.0 }
    }

    /// How much longer a request of `machine` takes than on an idle disk.
    fn slowness(&self, machine: usize) -> f64 {
        let others = self.busy.iter().enumerate().filter(|(at, _)| *at != machine);
        1.0 + self.spilling + others.map(|(_, busy)| busy.min(1.0)).sum::<f64>()
    }

    /// Spreads the writing of spilled pages over the second that begins.
    pub(super) fn spill(&mut self, pages: u64) {
        self.spilling = pages as f64 * SPILL_S;
    }

    pub(super) fn end_step(&mut self) {
        self.busy.clone_from(&self.next);
        self.next.fill(0.0);
    }
}

/// Resources that a machine shares with the others of its node.
pub(super) struct Shared<'a> {
    /// Pages that the node owns and nobody uses.
    pub(super) free_pages: &'a mut u64,
    /// Part of the node's used pages that is at other nodes.
    pub(super) remote: f64,
    pub(super) disk: &'a mut Disk,
    /// Which machine of the node it is.
    pub(super) index: usize,
}

/// A consumer of the simulated cluster.
#[derive(Clone, Debug)]
pub struct Machine {
    /// As the paper calls it.
    pub name: String,
    pub(super) account: Account,
    ram_pages: u64,
    keeps_dead_pages: bool,
    phases: Vec<Phase>,
    at: usize,
    /// Seconds done of the present phase: of work, or of sleep.
    done_s: f64,
    began_s: f64,
    footprint: f64,
    /// Footprint at the beginning of the phase.
    from: f64,
    /// Pool pages whose content nobody will ask for.
    dead_pages: u64,
    /// Touches that were not whole pages yet.
    carry: f64,
    /// Part of the last step's puts that failed.
    failing: f64,
    /// Programs that have ended.
    pub runs: Vec<Run>,
    /// Pages read from the disk.
    pub disk_reads: u64,
    /// Puts that found no room.
    pub puts_failed: u64,
}

impl Machine {
    /// A machine that is to run `phases`. `keeps_dead_pages`: it does not flush what a program
    /// leaves behind.
    pub fn new(
        id: ConsumerId,
        name: String,
        ram_pages: u64,
        keeps_dead_pages: bool,
        phases: Vec<Phase>,
    ) -> Machine {
        Machine {
            name,
            account: Account::new(id),
            ram_pages,
            keeps_dead_pages,
            phases,
            at: 0,
            done_s: 0.0,
            began_s: 0.0,
            footprint: 0.0,
            from: 0.0,
            dead_pages: 0,
            carry: 0.0,
            failing: 0.0,
            runs: Vec::new(),
            disk_reads: 0,
            puts_failed: 0,
        }
    }

    /// Whether it has done all that it had to.
    pub fn is_done(&self) -> bool {
        self.at >= self.phases.len()
    }

    /// Pages of the program that do not fit into its RAM: what it needs of the pool.
    pub fn overflow_pages(&self) -> u64 {
        (self.footprint.round() as u64).saturating_sub(self.ram_pages)
    }

    /// Pool pages that its program uses.
    pub fn live_pages(&self) -> u64 {
        self.account.used_pages() - self.dead_pages
    }

    /// Lets `dt_s` pass, at `now_s`.
    pub(super) fn step(&mut self, now_s: f64, dt_s: f64, shared: &mut Shared<'_>) {
        let mut left_s = dt_s;
        while left_s > 1e-9
            && let Some(&phase) = self.phases.get(self.at)
        {
            match phase {
                Phase::Begin => {
                    self.began_s = now_s + dt_s - left_s;
                    self.next_phase();
                }
                Phase::End => {
                    let took_s = now_s + dt_s - left_s - self.began_s;
                    self.runs.push(Run { began_s: self.began_s, took_s });
                    self.end_program(shared);
                    self.next_phase();
                }
                Phase::Sleep { seconds } => {
                    let slept_s = left_s.min(seconds - self.done_s);
                    self.done_s += slept_s;
                    left_s -= slept_s;
                    if self.done_s >= seconds - 1e-9 {
                        self.next_phase();
                    }
                }
                Phase::Work { work_s, footprint_pages, touches_per_s } => {
                    let growth = (footprint_pages as f64 - self.from) / work_s;
                    let cost = self.seconds_of_work(growth, touches_per_s, shared);
                    let done_s = (left_s / cost).min(work_s - self.done_s);
                    self.work(done_s, growth, touches_per_s, dt_s, shared);
                    self.done_s += done_s;
                    left_s -= done_s * cost;
                    if self.done_s >= work_s - 1e-9 {
                        self.footprint = footprint_pages as f64;
                        self.next_phase();
                    }
                }
            }
        }
    }

    /// Gives up pool pages, the dead ones first (nobody knows that they are dead, but they are the
    /// least recently used); the rest is on the disk from then on.
    pub(super) fn spill(&mut self, pages: u64) -> u64 {
        let pages = pages.min(self.account.used_pages());
        self.dead_pages -= pages.min(self.dead_pages);
        self.account.free_many(pages);
        pages
    }

    fn next_phase(&mut self) {
        self.at += 1;
        self.done_s = 0.0;
        self.from = self.footprint;
    }

    fn end_program(&mut self, shared: &mut Shared<'_>) {
        self.footprint = 0.0;
        if self.keeps_dead_pages {
            self.dead_pages = self.account.used_pages();
        } else {
            let pages = self.account.used_pages();
            self.account.free_many(pages);
            *shared.free_pages += pages;
            self.dead_pages = 0;
        }
    }

    /// Part of the pages outside RAM that is in the pool, from 0 to 1.
    fn pool_part(&self) -> f64 {
        match self.overflow_pages() {
            0 => 1.0,
            overflow => (self.live_pages() as f64 / overflow as f64).min(1.0),
        }
    }

    /// Touches in a second of work that are not in RAM.
    fn misses_per_s(&self, touches_per_s: f64) -> f64 {
        match self.overflow_pages() {
            0 => 0.0,
            overflow => touches_per_s * overflow as f64 / self.footprint,
        }
    }

    /// Seconds that a second of work takes at present.
    fn seconds_of_work(&self, growth: f64, touches_per_s: f64, shared: &Shared<'_>) -> f64 {
        let misses = self.misses_per_s(touches_per_s);
        let pool = self.pool_part();
        let pool_s = LOCAL_S + (REMOTE_S - LOCAL_S) * shared.remote;
        let slowness = shared.disk.slowness(shared.index);
        let read_s = READ_S * slowness;
        let grows = if self.overflow_pages() > 0 { growth.max(0.0) } else { 0.0 };
        // A disk that cannot keep up with the writes holds up who makes them.
        let write_s = WRITE_S * (slowness - 1.0).min(1.0);
        let puts = misses + grows;
        1.0 + misses * (pool * pool_s + (1.0 - pool) * read_s) + puts * self.failing * write_s
    }

    fn work(
        &mut self,
        work_s: f64,
        growth: f64,
        touches_per_s: f64,
        dt_s: f64,
        shared: &mut Shared<'_>,
    ) {
        let misses = self.misses_per_s(touches_per_s) * work_s + self.carry;
        self.carry = misses.fract();
        let misses = misses as u64;
        let gets = ((misses as f64 * self.pool_part()).round() as u64).min(self.live_pages());
        let reads = misses - gets;
        self.account.get_many(gets);
        self.free_live(gets, shared);

        let before = self.overflow_pages();
        self.footprint = (self.footprint + growth * work_s).max(0.0);
        let after = self.overflow_pages();
        if after < before {
            let part = self.live_pages() as f64 / before as f64;
            let freed = ((before - after) as f64 * part).round() as u64;
            self.free_live(freed.min(self.live_pages()), shared);
        }
        self.free_live(self.live_pages().saturating_sub(after), shared);

        let room_for = after - self.live_pages();
        let puts = (misses + after.saturating_sub(before)).min(room_for);
        let over_dead = puts.min(self.dead_pages);
        self.dead_pages -= over_dead;
        self.account.overwrite_many(over_dead);
        let new = puts - over_dead;
        let stored = self.account.put_many(new, *shared.free_pages);
        *shared.free_pages -= stored;
        let failed = new - stored;
        self.failing = if puts > 0 { failed as f64 / puts as f64 } else { 0.0 };
        self.puts_failed += failed;
        self.disk_reads += reads;
        let busy_s = reads as f64 * READ_S + failed as f64 * WRITE_S;
        shared.disk.next[shared.index] += busy_s / dt_s;
    }

    fn free_live(&mut self, pages: u64, shared: &mut Shared<'_>) {
        self.account.free_many(pages);
        *shared.free_pages += pages;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(free_pages: u64, keeps_dead_pages: bool) -> (Machine, u64) {
        let work =
            |footprint_pages| Phase::Work { work_s: 5.0, footprint_pages, touches_per_s: 500.0 };
        let phases = vec![
            Phase::Sleep { seconds: 1.0 },
            Phase::Begin,
            work(100 * MIB),
            work(40 * MIB),
            work(100 * MIB),
            Phase::End,
        ];
        let mut machine =
            Machine::new(ConsumerId(0), "VM1".into(), 50 * MIB, keeps_dead_pages, phases);
        let mut free = free_pages;
        let mut disk = Disk::new(1);
        for tick in 0..100_000 {
            if machine.is_done() {
                break;
            }
            let mut shared =
                Shared { free_pages: &mut free, remote: 0.0, disk: &mut disk, index: 0 };
            machine.step(f64::from(tick) * 0.1, 0.1, &mut shared);
            disk.end_step();
            assert_eq!(free + machine.account.used_pages(), free_pages, "no page is lost or made");
            assert!(machine.live_pages() <= machine.overflow_pages());
        }
        assert!(machine.is_done());
        (machine, free)
    }

    #[test]
    fn a_program_takes_its_work_and_what_it_waits_for() {
        let (with_room, free) = run(1000 * MIB, false);
        assert!((15.0..15.2).contains(&with_room.runs[0].took_s), "{:?}", with_room.runs);
        assert_eq!((with_room.disk_reads, with_room.puts_failed, free), (0, 0, 1000 * MIB));
        let (with_half, _) = run(25 * MIB, false);
        let (without, _) = run(0, false);
        assert!(with_room.runs[0].took_s < with_half.runs[0].took_s);
        assert!(with_half.runs[0].took_s < without.runs[0].took_s);
        assert!(with_half.disk_reads < without.disk_reads);
    }

    #[test]
    fn what_a_program_leaves_behind_stays_until_it_is_spilled() {
        let (mut machine, free) = run(1000 * MIB, true);
        assert_eq!(machine.live_pages(), 0);
        assert_eq!(machine.account.used_pages(), 1000 * MIB - free);
        assert!(machine.account.used_pages() >= 50 * MIB - 1);
        let held = machine.account.used_pages();
        assert_eq!(machine.spill(MIB), MIB);
        assert_eq!(machine.spill(u64::MAX), held - MIB);
    }
}
