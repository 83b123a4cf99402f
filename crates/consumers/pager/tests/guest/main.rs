//! A pager and a machine, both processes of their own, and a donor: guest RAM with an eighth of it
//! local, under threads that check every word they wrote, while the pager is killed.
//!
//! The test program is also the pager and the machine, by its first argument, before the runner
//! reads any.

mod firecracker;
mod machine;
mod malformed;
mod qemu;
mod world;

use hecaton_testkit::wait_until;
use libtest_mimic::{Arguments, Completion, Trial};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;
use world::{Machine, World};

/// 128 MiB, an eighth of it local.
const PAGES: usize = 32 << 10;

fn writers_never_lose_a_write() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    for _ in 0..4 {
        machine.order("hammer 6000");
        let stats = world.stats();
        assert!(stats.memory_file_bytes <= stats.local_limit_bytes, "{stats:?}");
        assert_eq!(stats.guest_ram_bytes, (PAGES * machine::PAGE) as u64);
    }
    machine.order("check");
    let stats = world.stats();
    assert!(stats.pages_evicted > PAGES as u64 && stats.pages_in > 0, "{stats:?}");
    assert!(stats.pages_dropped_clean > 0, "nothing was ever clean: {stats:?}");
    assert!(stats.local_peak_bytes <= stats.local_limit_bytes, "{stats:?}");
    machine.end();
    world.end();
}

fn a_killed_pager_loses_nothing() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    let mut deaths = 0;
    for _ in 0..3 {
        machine.begin("hammer 7000");
        // Fewer than the node takes for a pager that cannot live.
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(150 + 37 * deaths % 300));
            world.kill_pager();
            deaths += 1;
        }
        machine.wait();
        std::thread::sleep(Duration::from_secs(2));
    }
    machine.order("check");
    let stats = world.stats();
    assert_eq!(stats.restarts, deaths, "{stats:?}");
    assert!(stats.memory_file_bytes <= stats.local_limit_bytes, "{stats:?}");
    machine.end();
    world.end();
}

fn freed_memory_is_zero_and_leaves_the_pool() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    machine.order("fill");
    world.control("{\"evict\":{\"down_to_bytes\":0}}");
    let full = world.stats();
    assert_eq!(full.memory_file_bytes, 0, "{full:?}");
    assert_eq!(full.pool_bytes, (PAGES * machine::PAGE) as u64, "{full:?}");
    // Evicted pages, all of one half.
    machine.order(&format!("free 0 {}", PAGES / 2));
    let half = world.stats();
    assert_eq!(half.pages_discarded, PAGES as u64 / 2, "{half:?}");
    assert_eq!(half.pool_bytes, full.pool_bytes / 2, "{half:?}");
    machine.order("check");
    // Resident pages: let go of, but not freed; and then freed.
    world.control(&format!("{{\"resize_local\":{{\"bytes\":{}}}}}", 2 * PAGES * machine::PAGE));
    machine.order("fill");
    machine.order(&format!("let_go {} 512", PAGES - 512));
    machine.order("check");
    machine.order("fill");
    machine.order(&format!("free {} 512", PAGES - 512));
    machine.order("check");
    world.control(&format!("{{\"resize_local\":{{\"bytes\":{}}}}}", world::LOCAL));
    machine.order("check");
    let donors_before = world.lent_pages();
    machine.order(&format!("free 0 {PAGES}"));
    wait_until("the pool has its memory back", || world.lent_pages() < donors_before / 2);
    assert_eq!(world.stats().memory_file_bytes, 0);
    assert_eq!(world.stats().local_bytes, 0);
    machine.order("check");
    machine.end();
    world.end();
}

fn a_balloon_under_load() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    machine.begin("balloon 20000");
    wait_until("memory is ballooned", || world.stats().pages_discarded > 0);
    world.kill_pager();
    wait_until("it is for the next pager", || world.stats().pages_discarded > 0);
    machine.wait();
    machine.order("check");
    machine.end();
    world.end();
}

fn memory_is_plugged_and_unplugged() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES / 2);
    machine.order("fill");
    machine.order(&format!("plug {}", PAGES / 2));
    world.kill_pager();
    machine.order("hammer_plugged 4000");
    let stats = world.stats();
    assert_eq!(stats.guest_ram_bytes, (PAGES * machine::PAGE) as u64);
    assert!(stats.memory_file_bytes <= stats.local_limit_bytes, "{stats:?}");
    machine.order("unplug");
    let stats = world.stats();
    assert_eq!(stats.guest_ram_bytes, (PAGES / 2 * machine::PAGE) as u64);
    assert!(stats.pool_bytes <= stats.guest_ram_bytes, "{stats:?}");
    machine.order("check");
    // The file was closed, and so its memory is the host's again.
    assert!(world.pager_memory_files() == 1, "the pager holds on to an unplugged file");
    machine.order(&format!("plug {}", PAGES / 4));
    machine.order("hammer_plugged 1000");
    machine.order("check");
    machine.end();
    world.end();
}

fn a_limit_is_changed_while_it_runs() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    machine.begin("hammer 6000");
    let bytes = 64u64 << 20;
    world.control(&format!("{{\"resize_local\":{{\"bytes\":{bytes}}}}}"));
    wait_until("more is local than the limit before", || {
        world.stats().memory_file_bytes > world::LOCAL
    });
    world.control(&format!("{{\"resize_local\":{{\"bytes\":{}}}}}", world::LOCAL));
    let stats = world.stats();
    assert!(stats.memory_file_bytes <= stats.local_limit_bytes, "{stats:?}");
    machine.wait();
    machine.order("check");
    machine.end();
    world.end();
}

fn a_machine_leaves_while_it_runs() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    machine.order("hammer 3000");
    assert!(world.stats().pool_bytes > world::LOCAL);
    machine.begin("hammer 6000");
    world.control("\"detach\"");
    world.kill_pager();
    wait_until("all pages are home", || world.stats().processes == 0);
    machine.wait();
    // No page is evicted any more: the check finds every page that came back wrong.
    machine.order("check");
    machine.order("hammer 1000");
    wait_until("nothing is in the pool", || world.lent_pages() == 0);
    assert_eq!(world.pager_memory_files(), 0);
    world.end();
    machine.order("check");
    machine.end();
}

fn a_killed_machine_leaves_nothing() {
    let world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    machine.order("fill");
    assert!(world.lent_pages() > 0);
    let before = world.stats().pages_in;
    machine.begin("hammer 100000");
    wait_until("pages go to and fro", || world.stats().pages_in > before + 1000);
    machine.kill();
    wait_until("the pager has noticed", || world.stats().processes == 0);
    wait_until("its memory is given back", || world.lent_pages() == 0);
    // State file and the two sockets.
    wait_until("the node holds nothing of it", || world.held() == 3);
    assert_eq!(world.pager_memory_files(), 0);
    // The same pager serves the machine's next life.
    let mut machine = Machine::start(&world, PAGES);
    machine.order("hammer 500");
    machine.order("check");
    machine.end();
    world.end();
}

fn a_machine_whose_memory_is_lost_is_left_to_its_supervisor() {
    let mut world = World::start();
    let mut machine = Machine::start(&world, PAGES);
    machine.order("fill");
    world.control("{\"evict\":{\"down_to_bytes\":0}}");
    world.lose_the_donor();
    machine.begin("check");
    wait_until("it is reported", || world.stats().error.is_some());
    // Not killed, and not given anything else: it waits.
    std::thread::sleep(Duration::from_millis(500));
    assert!(machine.lives());
    let reason = world.stats().error.unwrap();
    assert!(reason.contains("lost"), "{reason}");
    machine.kill();
    world.end_with_failure();
}

const TESTS: &[(&str, fn())] = &[
    ("writers_never_lose_a_write", writers_never_lose_a_write),
    ("a_killed_pager_loses_nothing", a_killed_pager_loses_nothing),
    ("freed_memory_is_zero_and_leaves_the_pool", freed_memory_is_zero_and_leaves_the_pool),
    ("a_balloon_under_load", a_balloon_under_load),
    ("memory_is_plugged_and_unplugged", memory_is_plugged_and_unplugged),
    ("a_limit_is_changed_while_it_runs", a_limit_is_changed_while_it_runs),
    ("a_machine_leaves_while_it_runs", a_machine_leaves_while_it_runs),
    ("a_killed_machine_leaves_nothing", a_killed_machine_leaves_nothing),
    ("qemu_boots_and_survives", qemu::boots_and_survives_dead_pagers_and_reboots),
    ("qemu_plugs_memory", qemu::memory_is_plugged_or_refused_by_qmp),
    (
        "a_machine_whose_memory_is_lost_is_left_to_its_supervisor",
        a_machine_whose_memory_is_lost_is_left_to_its_supervisor,
    ),
    ("firecracker_restores", firecracker::a_snapshot_is_restored_from_the_pool),
    ("firecracker_malformed", firecracker::malformed_handovers_harm_nobody),
    ("malformed_handovers_harm_nobody", malformed::handovers_harm_nobody),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["be-the-pager"] => world::be_the_pager(),
        ["be-the-machine", socket, pages] => {
            machine::run(Path::new(socket), pages.parse().expect("a number"));
            ExitCode::SUCCESS
        }
        ["be-firecracker", socket] => {
            firecracker::run(Path::new(socket));
            ExitCode::SUCCESS
        }
        _ => run_tests(),
    }
}

/// One at a time: each has processes of its own, and checks what is left of them.
fn run_tests() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trial = |(name, test): &(&'static str, fn())| {
        let (name, test) = (*name, *test);
        Trial::ignorable_test(name, move || match world::userfaultfd_is_usable() {
            Ok(_) => {
                test();
                Ok(Completion::Completed)
            }
            Err(errno) => {
                let reason = format!("no userfaultfd here ({errno:?})");
                println!("skipped: {name}: {reason}");
                Ok(Completion::ignored_with(reason))
            }
        })
    };
    libtest_mimic::run(&arguments, TESTS.iter().map(trial).collect()).exit_code()
}
