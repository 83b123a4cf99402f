//! Real programs on the real `hecaton` command, and what is killed under them.
//!
//! Everything here goes through the command line, as a person's use would. All tests share one
//! cluster, except for those that break it; after each of them nothing may borrow any more and the
//! donors must have all of their memory back.

mod cluster;
mod concurrent;
mod crash;
mod fork;
mod guest;
mod harness;
mod integrity;
mod life;
mod limit;
mod pool;
mod process;
mod programs;
mod redis;
mod traffic;
mod unprivileged;
mod usage;
mod vm;

use cluster::{AFTER_LEASE, Cluster, PATIENCE};
use harness::Test;
use std::process::ExitCode;

/// Each donor's share; 24 programs at once are what needs most.
const LEND: &str = "1500M";

const TESTS: &[Test<Cluster>] = &[
    Test { name: "usage::bad_input_is_one_clear_line", run: usage::bad_input_is_one_clear_line },
    Test { name: "usage::a_static_program_is_refused", run: usage::a_static_program_is_refused },
    Test { name: "life::exit_statuses_are_passed_on", run: life::exit_statuses_are_passed_on },
    Test { name: "life::signals_are_passed_on", run: life::signals_are_passed_on },
    Test { name: "life::exec_starts_anew", run: life::exec_starts_anew },
    Test {
        name: "life::a_program_may_end_at_any_point",
        run: life::a_program_may_end_at_any_point,
    },
    Test {
        name: "life::a_process_too_many_cannot_be_forked",
        run: life::a_process_too_many_cannot_be_forked,
    },
    Test { name: "programs::threads_verify", run: programs::threads_verify },
    Test { name: "programs::memory_that_moves", run: programs::memory_that_moves },
    Test { name: "programs::sort_like_without", run: programs::sort_like_without },
    Test { name: "programs::a_shell_pipeline", run: programs::a_shell_pipeline },
    Test { name: "programs::stress_ng_verifies", run: programs::stress_ng_verifies },
    Test { name: "fork::without_exec", run: fork::without_exec },
    Test { name: "fork::python_multiprocessing", run: fork::python_multiprocessing },
    Test { name: "fork::a_storm", run: fork::a_storm },
    Test { name: "fork::past_libc", run: fork::past_libc },
    Test { name: "unprivileged::programs_fork", run: unprivileged::programs_fork },
    Test { name: "redis::bgsave_under_load", run: redis::bgsave_under_load },
    Test { name: "limit::resident_memory_stays_below", run: limit::resident_memory_stays_below },
    Test { name: "pool::a_full_one_ends_the_program", run: pool::a_full_one_ends_the_program },
    Test {
        name: "pool::a_donor_gone_for_good_ends_the_program",
        run: pool::a_donor_gone_for_good_ends_the_program,
    },
    Test {
        name: "integrity::a_page_damaged_once_is_read_again",
        run: integrity::a_page_damaged_once_is_read_again,
    },
    Test {
        name: "integrity::a_page_damaged_twice_ends_the_program",
        run: integrity::a_page_damaged_twice_ends_the_program,
    },
    Test { name: "limit::the_pager_stays_small", run: limit::the_pager_stays_small },
    Test {
        name: "traffic::zero_pages_and_clean_pages_are_not_sent",
        run: traffic::zero_pages_and_clean_pages_are_not_sent,
    },
    Test { name: "concurrent::many_runs_at_once", run: concurrent::many_runs_at_once },
    Test { name: "crash::of_the_pager", run: crash::of_the_pager },
    Test {
        name: "crash::of_a_pager_while_programs_start",
        run: crash::of_a_pager_while_programs_start,
    },
    Test { name: "crash::of_a_pager_without_end", run: crash::of_a_pager_without_end },
    Test { name: "crash::of_the_node", run: crash::of_the_node },
    Test {
        name: "crash::of_the_node_and_then_of_the_pager",
        run: crash::of_the_node_and_then_of_the_pager,
    },
    Test { name: "crash::of_all_who_serve_a_family", run: crash::of_all_who_serve_a_family },
    Test { name: "crash::of_the_launcher", run: crash::of_the_launcher },
    Test { name: "crash::of_a_donor", run: crash::of_a_donor },
    Test { name: "crash::of_a_pager_during_forks", run: crash::of_a_pager_during_forks },
    Test { name: "crash::of_a_pager_in_a_storm", run: crash::of_a_pager_in_a_storm },
    Test {
        name: "vm::what_cannot_be_paged_is_said_before_it_starts",
        run: vm::what_cannot_be_paged_is_said_before_it_starts,
    },
    Test { name: "vm::a_guest_verifies_its_memory", run: vm::a_guest_verifies_its_memory },
    Test { name: "vm::debians_own_qemu", run: vm::debians_own_qemu },
    Test { name: "vm::four_gib_with_128_mib", run: vm::four_gib_with_128_mib },
    Test { name: "vm::it_is_shown_and_resized", run: vm::it_is_shown_and_resized },
    Test { name: "vm::memory_is_plugged", run: vm::memory_is_plugged },
    Test {
        name: "vm::what_is_plugged_and_cannot_be_paged_stops_it",
        run: vm::what_is_plugged_and_cannot_be_paged_stops_it,
    },
    Test { name: "vm::suspended_and_resumed", run: vm::suspended_and_resumed },
    Test { name: "vm::rebooted_again_and_again", run: vm::rebooted_again_and_again },
    Test { name: "vm::saved_and_dumped", run: vm::saved_and_dumped },
    Test { name: "vm::eight_small_ones_at_once", run: vm::eight_small_ones_at_once },
    Test { name: "vm::it_is_detached_and_runs_on", run: vm::it_is_detached_and_runs_on },
    Test { name: "vm::libvirt_starts_it", run: vm::libvirt_starts_it },
    Test { name: "vm::a_killed_machine_leaves_nothing", run: vm::a_killed_machine_leaves_nothing },
    Test { name: "vm::pagers_and_donors_die_under_it", run: vm::pagers_and_donors_die_under_it },
    Test { name: "vm::lost_memory_stops_it", run: vm::lost_memory_stops_it },
];

fn main() -> ExitCode {
    let cluster = Cluster::start(3, LEND);
    let usable = match &cluster {
        Ok(cluster) => cluster.check_userfaultfd().map(|()| cluster),
        // A cluster needs nothing that a machine might forbid: this is a failure, not a skip.
        Err(error) => {
            println!("running 1 test\ntest cluster ... FAILED\n    {error:#}");
            println!("test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured");
            return ExitCode::FAILURE;
        }
    };
    harness::run(TESTS, usable.as_ref().map_err(String::as_str).copied(), |name, cluster| {
        let killed = name.starts_with("crash::");
        cluster.wait_until_idle(if killed { AFTER_LEASE } else { PATIENCE })
    })
}
