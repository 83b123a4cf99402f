//! Real programs on the real `hecaton` command, and what is killed under them.
//!
//! Everything goes through the command line, as a person's use does. Each test has a world of its
//! own: see `harness::world`.

mod agent;
mod announce;
mod api;
mod attach;
mod cold;
mod concurrent;
mod containers;
mod cores;
mod crash;
mod dashboard;
mod disk;
mod domains;
mod drive;
mod encrypted;
mod file;
mod fork;
mod grants;
mod harness;
mod harvest;
mod hosts;
mod integrity;
mod life;
mod limit;
mod managers;
mod mirror;
mod nbd_clients;
mod numa_host;
mod parking;
mod policy;
mod pool;
mod programs;
mod recovery;
mod redis;
mod restart;
mod secrets;
mod secure;
mod sharing;
mod swap;
mod traffic;
mod unprivileged;
mod usage;
mod vm;
mod volume;

use harness::runner::{self, Test};
use std::process::ExitCode;

/// Tests under the names of their functions. Each is given what its signature asks for.
macro_rules! tests {
    [$($module:ident::$function:ident),* $(,)?] => {
        vec![$(Test::new(
            concat!(stringify!($module), "::", stringify!($function)),
            $module::$function,
        )),*]
    };
}

fn main() -> ExitCode {
    runner::run(tests![
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
        encrypted::donors_can_neither_read_nor_change_a_volume,
        restart::of_everything_in_any_order,
        restart::of_a_node_whose_program_ends_meanwhile,
        restart::of_a_node_under_a_machine,
        restart::of_a_node_under_qemu,
        restart::of_a_node_under_a_volume,
        mirror::silent_donors_are_done_without,
        mirror::pagers_die_while_a_donor_is_silent,
        mirror::a_donor_is_emptied_under_a_program,
        mirror::donors_have_memory_back_under_a_program,
        mirror::copies_make_room_for_a_donor_that_wants_memory_back,
        mirror::a_program_uses_the_donors_that_are_named,
        mirror::pages_that_go_bad_in_a_donor_are_mended,
        mirror::ranges_of_a_machine_move,
        cold::two_donors_of_six_are_away,
        cold::two_donors_are_away_from_a_machine,
        cold::what_is_encrypted_is_coded_and_mended,
        parking::what_nobody_can_take_is_served_from_the_disk,
        parking::a_full_disk_takes_nothing_away,
        parking::a_host_that_is_short_of_memory_has_it_back,
        hosts::they_fail_one_after_another,
        hosts::programs_outlive_them,
        hosts::stress_ng_outlives_them,
        hosts::both_copies_are_lost,
        hosts::who_outsleeps_the_lease_is_fenced,
        hosts::twenty_come_and_go,
        announce::finds_donors_without_a_manager,
        recovery::of_a_node_that_others_borrow_from,
        managers::take_turns,
        secure::pages_travel_by_tls,
        secrets::are_in_no_log,
        sharing::a_volume_goes_from_node_to_node,
        sharing::nodes_read_one_volume_or_one_writes,
        policy::targets_are_kept_to,
        grants::are_made_once_wherever_the_manager_is_killed,
        api::is_as_described,
        volume::what_cannot_be_is_one_clear_line,
        volume::clients_of_others_agree,
        nbd_clients::a_shell_and_a_file_system_of_others,
        volume::one_is_resized_while_it_is_used,
        volume::over_tls_only_who_may_is_served,
        volume::what_is_buffered_outlives_the_process,
        volume::a_snapshot_stays_as_it_is,
        volume::twenty_are_used_at_once,
        volume::many_read_or_one_writes,
        volume::an_export_is_taken_back,
        volume::the_rest_is_spilled_and_comes_back,
        volume::fio_verifies_while_donors_fail,
        volume::a_write_to_a_silent_donor_is_settled,
        volume::its_process_is_killed_under_a_client,
        file::it_is_a_file_of_one_size,
        file::it_has_another_size_as_it_is_used,
        file::an_export_is_taken_back,
        file::nobody_writes_where_all_may_read,
        file::file_systems_keep_their_files,
        file::fio_verifies_while_its_process_is_killed,
        file::requests_come_through_io_uring,
        swap::it_ends_as_its_program_does,
        swap::ten_times_the_limit,
        swap::donors_can_read_nothing,
        swap::its_command_is_killed,
        drive::file_systems_outlive_what_is_killed,
        drive::two_machines_know_nothing_of_it,
        drive::fio_verifies_in_a_guest,
        drive::two_machines_read_what_neither_writes,
        drive::it_has_another_size_as_the_guest_runs,
        drive::a_machine_swaps_on_a_volume,
        disk::a_file_system_outlives_what_is_killed,
        dashboard::in_a_browser,
        dashboard::in_a_terminal,
        vm::what_cannot_be_paged_is_said_before_it_starts,
        vm::a_guest_verifies_its_memory,
        vm::debians_own_qemu,
        vm::four_gib_with_128_mib,
        vm::it_is_shown_and_resized,
        vm::memory_is_plugged,
        vm::memory_grows_and_shrinks,
        vm::what_is_plugged_and_cannot_be_paged_stops_it,
        harvest::a_guest_grows_and_shrinks,
        harvest::debians_own_qemu,
        harvest::a_guest_that_gives_nothing,
        harvest::what_is_readied_is_used_again,
        harvest::figure_5,
        agent::it_divides_a_host_and_is_killed,
        agent::a_guest_is_told_before_it_shrinks,
        agent::a_regular_vm_evicts_a_harvest_vm,
        agent::a_machine_shrinks_by_its_balloon,
        agent::a_silent_machine_stalls_nobody,
        agent::what_the_node_lends_gives_way,
        agent::a_quota_of_harvest_vms_is_kept,
        agent::what_cannot_be_is_refused,
        containers::one_takes_what_is_free_and_gives_it,
        containers::one_that_cannot_give_is_evicted,
        containers::what_cannot_be_is_refused,
        containers::on_two_nodes_and_cgroup_version_2,
        cores::they_are_divided_and_the_agent_is_killed,
        cores::busy_machines_share_by_weight,
        cores::without_a_controller_they_count_all_the_same,
        domains::a_domain_is_a_harvest_vm,
        domains::no_libvirt_stalls_nobody,
        numa_host::machines_stay_within_a_node,
        numa_host::what_is_lent_gives_way_on_its_node,
        numa_host::a_harvest_vm_gives_on_the_node_in_need,
        numa_host::a_balloon_gives_on_its_node,
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
    ])
}
