//! The report of `hecaton simulate policies`: one file, no script, nothing fetched.
//!
//! The plots are drawn here rather than by Vega-Lite in the browser, as was planned for reports: the library
//! would be a megabyte in each file, for bars and lines.

use super::plot::{self, COLOURS, Group, Line, escape};
use super::results::{Compared, Report, ScenarioReport, faster};
use hecaton_memory::PAGE_SIZE;
use hecaton_policy::cluster::targets::Policy;
use hecaton_policy::simulation::outcome::Course;
use std::fmt::Write as _;

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1d2126;--soft:#5c6670;--grid:#d9dee3;--back:#fff;--box:#f5f7f9;\
--c0:#2467b3;--c1:#d9730d;--c2:#2b8a57;--c3:#8a4fb5}\
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ec;--soft:#9aa5b1;--grid:#39424c;--back:#15191d;\
--box:#1e242a;--c0:#6aa9ef;--c1:#f2a154;--c2:#62c48f;--c3:#c49ae6}}\
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:70rem;\
margin:0 auto;padding:1.5rem}\
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.5rem 0 .3rem}\
h3{font-size:.95rem;margin:0 0 .2rem}p{max-width:48rem}.soft{color:var(--soft)}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;margin:.8rem 0}\
th,td{padding:.2rem .5rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}\
th:first-child,td:first-child{text-align:left}tr.best td{font-weight:600}\
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(24rem,1fr));gap:.8rem}\
figure{margin:0;background:var(--box);border-radius:6px;padding:.7rem}\
svg{width:100%;height:auto;display:block}\
.grid{stroke:var(--grid)}.tick{fill:var(--soft);font-size:11px}\
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}\
path{fill:none;stroke-width:1.8}.l0{stroke:var(--c0)}.l1{stroke:var(--c1)}.l2{stroke:var(--c2)}\
.l3{stroke:var(--c3)}.dashed{stroke-width:1.1;stroke-dasharray:4 3}\
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin:0 .3rem 0 .9rem;\
vertical-align:-1px}.k0{background:var(--c0)}.k1{background:var(--c1)}.k2{background:var(--c2)}\
.k3{background:var(--c3)}";

/// The whole report.
pub(super) fn page(report: &Report) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>Memory policies, simulated</title><style>{STYLE}</style></head><body>\n\
         <h1>Memory policies, simulated</h1>\n\
         <p>The scenarios of the vMCA paper (Garrido and Carpenter, 2017, table IV), and two more, on a \
         model of a cluster that drives Hecaton's own decisions. Nodes 3 and 4 run the machines; the others \
         only lend. Each figure is the mean of {} runs, from seed {} on.</p>\n\
         <p class=\"soft\">The times are the model's. They compare policies under equal \
         conditions; the paper's stand beside them for the direction and the order of magnitude, not to be \
         met. What is modelled, and how coarsely, is in docs/policies.md.</p>\n",
        report.runs, report.seed,
    );
    for scenario in &report.scenarios {
        section(scenario, &mut page);
    }
    page + "</body></html>\n"
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
        "<figure><h3>Mean running time<span class=\"key k0\"></span>node 3\
         <span class=\"key k1\"></span>node 4</h3>{}</figure>",
        plot::bars(&groups, "s", 1000.0, 310.0)
    );
    table(scenario, page);
    use_over_time(scenario, page);
}

/// What the paper found, and what came out here.
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
        let _ = write!(
            page,
            "<span class=\"key k{}\"></span>{}",
            at % COLOURS,
            escape(&course.machine)
        );
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
