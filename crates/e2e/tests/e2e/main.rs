//! Real programs on the real `hecaton` command, and what is killed under them.
//!
//! Everything here goes through the command line, as a person's use would. All tests share one
//! cluster, except for those that break it; after each of them nothing may borrow any more and the
//! donors must have all of their memory back.

mod attach;
mod cluster;
mod concurrent;
mod crash;
mod encrypted;
mod fork;
mod guest;
mod harness;
mod hosts;
mod integrity;
mod life;
mod limit;
mod mirror;
mod pool;
mod process;
mod programs;
mod redis;
mod restart;
mod traffic;
mod unprivileged;
mod usage;
mod vm;

use cluster::{AFTER_LEASE, Cluster, PATIENCE};
use harness::Test;
use std::process::ExitCode;

/// Each donor's share; 24 programs at once are what needs most.
const LEND: &str = "1500M";

/// Tests under the names of their functions.
macro_rules! tests {
    [$($module:ident::$function:ident),* $(,)?] => {
        &[$(Test {
            name: concat!(stringify!($module), "::", stringify!($function)),
            run: $module::$function,
        }),*]
    };
}

const TESTS: &[Test<Cluster>] = tests![
    usage::bad_input_is_one_clear_line,
    usage::a_static_program_is_refused,
    life::exit_statuses_are_passed_on,
    life::signals_are_passed_on,
    life::exec_starts_anew,
    life::a_program_may_end_at_any_point,
    life::a_process_too_many_cannot_be_forked,
    life::a_stopped_process_stops_nobody_else,
    programs::threads_verify,
    programs::memory_that_moves,
    programs::sort_like_without,
    programs::a_shell_pipeline,
    programs::stress_ng_verifies,
    programs::memory_that_trades_places,
    fork::without_exec,
    fork::python_multiprocessing,
    fork::a_storm,
    fork::past_libc,
    unprivileged::programs_fork,
    redis::bgsave_under_load,
    limit::resident_memory_stays_below,
    pool::a_full_one_ends_the_program,
    pool::a_donor_gone_for_good_ends_the_program,
    integrity::a_page_damaged_once_is_read_again,
    integrity::a_page_damaged_twice_ends_the_program,
    limit::the_pager_stays_small,
    traffic::zero_pages_and_clean_pages_are_not_sent,
    concurrent::many_runs_at_once,
    crash::of_the_pager,
    crash::of_a_pager_that_encrypts,
    crash::of_a_pager_while_programs_start,
    crash::of_a_pager_without_end,
    crash::of_the_node,
    crash::of_the_node_and_then_of_the_pager,
    crash::of_all_who_serve_a_family,
    crash::of_the_launcher,
    crash::of_a_donor,
    crash::of_a_pager_during_forks,
    crash::of_a_pager_in_a_storm,
    encrypted::donors_can_read_nothing,
    encrypted::donors_can_change_nothing,
    restart::of_everything_in_any_order,
    restart::of_a_node_whose_program_ends_meanwhile,
    restart::of_a_node_under_a_machine,
    mirror::silent_donors_are_done_without,
    mirror::pagers_die_while_a_donor_is_silent,
    mirror::a_donor_is_emptied_under_a_program,
    mirror::donors_have_memory_back_under_a_program,
    mirror::copies_make_room_for_a_donor_that_wants_memory_back,
    mirror::a_program_uses_the_donors_that_are_named,
    mirror::pages_that_go_bad_in_a_donor_are_mended,
    mirror::ranges_of_a_machine_move,
    hosts::they_fail_one_after_another,
    hosts::both_copies_are_lost,
    hosts::who_outsleeps_the_lease_is_fenced,
    vm::what_cannot_be_paged_is_said_before_it_starts,
    vm::a_guest_verifies_its_memory,
    vm::debians_own_qemu,
    vm::four_gib_with_128_mib,
    vm::it_is_shown_and_resized,
    vm::memory_is_plugged,
    vm::memory_grows_and_shrinks,
    vm::what_is_plugged_and_cannot_be_paged_stops_it,
    vm::suspended_and_resumed,
    vm::rebooted_again_and_again,
    vm::saved_and_dumped,
    vm::eight_small_ones_at_once,
    vm::it_is_detached_and_runs_on,
    attach::of_qemu,
    attach::of_firecracker,
    vm::libvirt_starts_it,
    vm::libvirt_of_the_backports_starts_it,
    vm::a_killed_machine_leaves_nothing,
    vm::pagers_and_donors_die_under_it,
    vm::lost_memory_stops_it,
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
