//! The recorded programs: they can be read, and the default order is the best on them.

use hecaton_policy::{
    evict,
    replay::{YARDSTICKS, mean_stalls, prefetch_table, recorded, table},
};

#[test]
fn the_default_order_loses_the_least_time_over_all_programs() {
    let programs = recorded().unwrap();
    let means = mean_stalls(&table(&programs, &[25, 50, 75]));
    let name = evict::default().name();
    let default = means.iter().find(|(order, _)| order == name).unwrap().1;
    for (order, mean) in &means {
        assert!(YARDSTICKS.contains(&order.as_str()) || default <= *mean, "{means:?}");
    }
}

#[test]
fn prefetching_saves_faults_and_wastes_little() {
    let programs = recorded().unwrap();
    let rows = prefetch_table(&programs, &[25, 50, 75]);
    let sum =
        |of: fn(&hecaton_policy::replay::PrefetchRow) -> u64| rows.iter().map(of).sum::<u64>();
    let (plain, faults) = (sum(|row| row.plain_fetch_faults), sum(|row| row.fetch_faults));
    assert!(faults * 2 < plain, "{faults} of {plain}");
    let (hits, waste) = (sum(|row| row.counters.hits), sum(|row| row.counters.waste));
    assert!(waste * 4 < hits, "{waste} wasted, {hits} hit");
    for row in rows.iter().filter(|row| row.program == "heat") {
        assert!(row.fetch_faults * 5 < row.plain_fetch_faults, "{row:?}");
    }
}
