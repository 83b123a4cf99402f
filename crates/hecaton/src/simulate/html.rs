//! The report of `hecaton simulate policies`.

use super::results::{Compared, Report, ScenarioReport, faster};
use crate::report::plot::{self, COLOURS, Group, Line, escape};
use crate::report::{self, key};
use hecaton_memory::PAGE_SIZE;
use hecaton_policy::cluster::targets::Policy;
use hecaton_policy::simulation::outcome::Course;
use std::fmt::Write as _;

/// The whole report.
pub(super) fn page(report: &Report) -> String {
    let mut body = format!(
        "<p>The scenarios of the vMCA paper (Garrido and Carpenter, 2017, table IV), and two more, on a \
         model of a cluster that drives Hecaton's own decisions. Nodes 3 and 4 run the machines; the others \
         only lend. Each figure is the mean of {} runs, from seed {} on.</p>\n\
         <p class=\"soft\">The times are the model's. They compare policies under equal \
         conditions; the paper's stand beside them for the direction and the order of magnitude, not to be \
         met. What is modelled, and how coarsely, is in docs/policies.md.</p>\n",
        report.runs, report.seed,
    );
    for scenario in &report.scenarios {
        section(scenario, &mut body);
    }
    report::page("Memory policies, simulated", &body)
}

fn section(scenario: &ScenarioReport, page: &mut String) {
    let _ = writeln!(
        page,
        "<h2>Scenario {}</h2>\n<p>{}</p>",
        escape(scenario.name),
        escape(scenario.description)
    );
    beside_the_paper(scenario, page);
    let group = |compared: &Compared| Group {
        label: compared.name.clone(),
        values: compared.mean_of_nodes_s.to_vec(),
    };
    let groups: Vec<Group> = scenario.policies.iter().map(group).collect();
    let _ = writeln!(
        page,
        "<figure><h3>Mean running time{}{}</h3>{}</figure>",
        key(0, "node 3"),
        key(1, "node 4"),
        plot::bars(&groups, "s", 1000.0, 310.0)
    );
    table(scenario, page);
    use_over_time(scenario, page);
}

/// Compares the paper's improvements with those of this simulation.
fn beside_the_paper(scenario: &ScenarioReport, page: &mut String) {
    let (Some(paper), Some(best)) = (scenario.paper, scenario.best_tlp()) else { return };
    let find = |wanted: fn(&Policy) -> bool| scenario.find(wanted);
    let (Some(local), Some(remote), Some(ours)) = (
        find(|policy| matches!(policy, Policy::GreedyLocal)),
        find(|policy| matches!(policy, Policy::GreedyRemote { .. })),
        find(|policy| matches!(policy, Policy::Anticipating(settings) if settings.take_back)),
    ) else {
        return;
    };
    let percent = |percent: f64| format!("{percent:.1} %");
    let improvement = |of: &Compared, over: &Compared, node: usize| {
        percent(100.0 * faster(of.mean_of_nodes_s[node], over.mean_of_nodes_s[node]))
    };
    let both = |of: &dyn Fn(usize) -> String| format!("{}, {}", of(0), of(1));
    let rows = [
        (
            "greedy-remote over greedy-local".to_owned(),
            both(&|node| percent(paper.remote_over_local_percent[node])),
            both(&|node| improvement(remote, local, node)),
        ),
        (
            "best TLP over greedy-remote".to_owned(),
            both(&|node| percent(paper.tlp_over_remote_percent[node])),
            both(&|node| improvement(best, remote, node)),
        ),
        (
            "P of the best TLP".to_owned(),
            both(&|node| format!("{} %", paper.best_percent[node])),
            format!("{} %", best.percent().unwrap_or_default()),
        ),
        (
            format!("anticipating over {}", best.name),
            String::new(),
            both(&|node| improvement(ours, best, node)),
        ),
    ];
    page.push_str(
        "<div class=\"wide\"><table><tr><th>mean running time, nodes 3 and 4</th><th>paper</th>\
         <th>here</th></tr>",
    );
    for (what, paper, here) in rows {
        let what = escape(&what);
        let _ = write!(page, "<tr><td>{what}</td><td>{paper}</td><td>{here}</td></tr>");
    }
    page.push_str("</table></div>\n");
}

fn table(scenario: &ScenarioReport, page: &mut String) {
    page.push_str(
        "<div class=\"wide\"><table><tr><th>policy</th><th>mean</th><th>longest</th>\
         <th>over local</th><th>over remote</th><th>fairness</th><th>adapts</th><th>below share</th>\
         <th>disk reads</th><th>moved</th><th>spilled</th></tr>",
    );
    let shortest =
        scenario.policies.iter().map(|compared| compared.mean_s).fold(f64::MAX, f64::min);
    for compared in &scenario.policies {
        let class = if compared.mean_s <= shortest { " class=\"best\"" } else { "" };
        let _ = write!(
            page,
            "<tr{class}><td>{}</td><td>{:.1} s</td><td>{:.1} s</td><td>{:+.1} %</td><td>{:+.1} %</td>\
             <td>{:.3}</td><td>{:.1} s</td><td>{:.1} s</td><td>{:.0}</td><td>{:.0} MiB</td>\
             <td>{:.0} MiB</td></tr>",
            escape(&compared.name),
            compared.mean_s,
            compared.longest_s,
            compared.faster_than_local * 100.0,
            compared.faster_than_remote * 100.0,
            compared.fairness,
            compared.adaptation_s,
            compared.below_share_s,
            compared.disk_reads,
            mib(compared.pages_moved),
            mib(compared.pages_spilled),
        );
    }
    page.push_str(
        "</table></div>\n<p class=\"soft\">Fairness: Jain's index of how far needs were met, 1 is even. \
         Adapts: the longest time at a stretch with less than nine tenths of a fair share of the cluster, mean of \
         all machines. Below share: all such time, for each program.</p>\n",
    );
}

/// Pool pages of each machine at node 3, in the first run.
fn use_over_time(scenario: &ScenarioReport, page: &mut String) {
    let shown = [
        scenario.find(|policy| matches!(policy, Policy::GreedyLocal)),
        scenario.find(|policy| matches!(policy, Policy::GreedyRemote { .. })),
        scenario.best_tlp(),
        scenario.find(|policy| matches!(policy, Policy::Anticipating(own) if own.take_back)),
    ];
    let shown: Vec<&Compared> = shown.into_iter().flatten().collect();
    let courses = || shown.iter().flat_map(|compared| &compared.courses);
    let seconds = courses().map(|course| course.samples.len()).max().unwrap_or(0);
    let used = courses().flat_map(|course| &course.samples).map(|sample| sample.used_pages);
    let most = mib(used.max().unwrap_or(0) as f64);
    let names = shown.first().map(|compared| compared.courses.as_slice()).unwrap_or_default();
    page.push_str("<h3>Pool memory in use at node 3, MiB");
    for (at, course) in names.iter().enumerate() {
        page.push_str(&key(at % COLOURS, &course.machine));
    }
    page.push_str(
        " <span class=\"soft\">(dashed: target, cut off at the top)</span></h3>\
         <div class=\"plots\">\n",
    );
    for compared in shown {
        let lines: Vec<Line> = compared
            .courses
            .iter()
            .enumerate()
            .flat_map(|(at, course)| lines(at, course))
            .collect();
        let _ = writeln!(
            page,
            "<figure><h3>{}</h3>{}</figure>",
            escape(&compared.name),
            plot::lines(&lines, "MiB", most, seconds, 480.0)
        );
    }
    page.push_str("</div>\n");
}

/// Use and target of one machine.
fn lines(at: usize, course: &Course) -> [Line; 2] {
    let used = course.samples.iter().map(|sample| Some(mib(sample.used_pages as f64)));
    let target = course.samples.iter().map(|sample| Some(mib(sample.target_pages? as f64)));
    [
        Line { colour: at, is_dashed: false, name: course.machine.clone(), values: used.collect() },
        Line {
            colour: at,
            is_dashed: true,
            name: format!("target of {}", course.machine),
            values: target.collect(),
        },
    ]
}

fn mib(pages: f64) -> f64 {
    pages * PAGE_SIZE as f64 / f64::from(1 << 20)
}
