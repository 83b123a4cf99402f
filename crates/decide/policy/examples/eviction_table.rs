//! Prints the tables of docs/eviction.md: `eviction_table [TRACE_FILE...]`, by default for the
//! traces of the project.

use anyhow::Context;
use hecaton_policy::replay::{
    Program, mean_stalls, prefetch_table, recorded, table, trace::decode,
};

const LOCAL_PERCENTS: [u32; 3] = [25, 50, 75];

fn main() -> anyhow::Result<()> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    let programs = if files.is_empty() {
        recorded()?
    } else {
        let load = |file: &String| {
            let trace = decode(&std::fs::read(file).with_context(|| file.clone())?)?;
            let name = file.rsplit('/').next().unwrap_or(file).trim_end_matches(".trace");
            Ok(Program::new(name, &trace))
        };
        files.iter().map(load).collect::<anyhow::Result<_>>()?
    };
    let rows = table(&programs, &LOCAL_PERCENTS);
    let means = mean_stalls(&rows);
    let orders: Vec<&str> = means.iter().map(|(order, _)| order.as_str()).collect();
    println!("| program | pages | local | {} |", orders.join(" | "));
    println!("|---|---|---|{}", "---|".repeat(orders.len()));
    for line in rows.chunks(orders.len()) {
        let first = &line[0];
        print!("| {} | {} | {} % |", first.program, first.footprint_pages, first.local_percent);
        for row in line {
            print!(" {:.2} % ({:.2}) |", row.miss_ratio * 100.0, row.stall_vs_belady);
        }
        println!();
    }
    print!("| geometric mean | | |");
    means.iter().for_each(|(_, mean)| print!(" ({mean:.2}) |"));
    println!("\n");

    println!(
        "| program | local | fetching faults, plain | with prefetch | triggers | hits | waste |"
    );
    println!("|---|---|---|---|---|---|---|");
    for row in prefetch_table(&programs, &LOCAL_PERCENTS) {
        println!(
            "| {} | {} % | {} | {} | {} | {} | {} |",
            row.program,
            row.local_percent,
            row.plain_fetch_faults,
            row.fetch_faults,
            row.trigger_faults,
            row.counters.hits,
            row.counters.waste
        );
    }
    Ok(())
}
