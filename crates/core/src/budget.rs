//! The arithmetic of budgets: what a task reserves, and which of the tasks that wait may start. All budgets of a task must have room, decided in one step, all
//! or nothing; within a lane nothing overtakes a task that waits for room, so a big task is never starved by small ones.

/// What is in use of a budget.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tasks running.
    pub running: i64,
    /// Predicted tokens of the running tasks.
    pub tokens: i64,
}

impl Usage {
    /// The sum, saturating.
    pub fn plus(self, other: Usage) -> Usage {
        Usage { running: self.running.saturating_add(other.running), tokens: self.tokens.saturating_add(other.tokens) }
    }

    /// The difference, saturating.
    pub fn minus(self, other: Usage) -> Usage {
        Usage { running: self.running.saturating_sub(other.running), tokens: self.tokens.saturating_sub(other.tokens) }
    }
}

/// The limits of a budget; `None` does not limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limit {
    /// Most tasks running at once.
    pub max_running: Option<i64>,
    /// Most predicted tokens in flight.
    pub max_tokens: Option<i64>,
    /// Tokens of a task that predicts none.
    pub default_tokens: Option<i64>,
}

impl Limit {
    /// What a task with this prediction reserves of the budget. A missing or zero prediction is never free where tokens are limited: it counts as the
    /// default, and without one as the whole limit, so that it runs alone.
    pub fn cost(&self, predicted: Option<i64>) -> Usage {
        let tokens = predicted.filter(|tokens| *tokens > 0).or(self.default_tokens).or(self.max_tokens).unwrap_or(0);
        Usage { running: 1, tokens }
    }

    /// Whether `usage` is within the limit.
    pub fn holds(&self, usage: Usage) -> bool {
        self.max_running.is_none_or(|max| usage.running <= max) && self.max_tokens.is_none_or(|max| usage.tokens <= max)
    }

    /// Whether a task of this prediction could run on an idle budget.
    pub fn could_ever_run(&self, predicted: Option<i64>) -> bool {
        self.holds(self.cost(predicted))
    }
}

/// A task that waits: the lane it stands in (an index) and the tokens it predicts.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Index into the lanes.
    pub lane: usize,
    /// Predicted tokens, if any.
    pub tokens: Option<i64>,
}

/// Admits waiting tasks in their order and adds what they reserve to `usage`. `lanes[i]` lists, as indices into `limits` and `usage`, the budgets that lane i
/// draws on. A lane is passed over from its first task that finds no room. Returns the indices of the admitted candidates, at most `max`.
pub fn admit(usage: &mut [Usage], limits: &[Limit], lanes: &[Vec<usize>], candidates: &[Candidate], max: usize) -> Vec<usize> {
    let mut shut = vec![false; lanes.len()];
    let mut admitted = Vec::with_capacity(max.min(candidates.len()));
    for (at, candidate) in candidates.iter().enumerate() {
        if admitted.len() == max {
            break;
        }
        if shut[candidate.lane] {
            continue;
        }
        let draws = &lanes[candidate.lane];
        let after = |budget: &usize| usage[*budget].plus(limits[*budget].cost(candidate.tokens));
        if draws.iter().all(|budget| limits[*budget].holds(after(budget))) {
            for budget in draws {
                usage[*budget] = usage[*budget].plus(limits[*budget].cost(candidate.tokens));
            }
            admitted.push(at);
        } else {
            shut[candidate.lane] = true;
        }
    }
    admitted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limit(max_running: i64, max_tokens: i64) -> Limit {
        Limit { max_running: Some(max_running), max_tokens: Some(max_tokens), default_tokens: None }
    }

    #[test]
    fn a_missing_or_zero_prediction_is_not_free() {
        assert_eq!(limit(4, 100).cost(None).tokens, 100);
        assert_eq!(limit(4, 100).cost(Some(0)).tokens, 100);
        let with_default = Limit { default_tokens: Some(7), ..limit(4, 100) };
        assert_eq!(with_default.cost(Some(0)).tokens, 7);
    }

    #[test]
    fn nothing_overtakes_a_task_that_waits_for_tokens_in_its_lane() {
        let mut usage = [Usage { running: 1, tokens: 60 }];
        let waiting = [Candidate { lane: 0, tokens: Some(50) }, Candidate { lane: 0, tokens: Some(1) }];
        assert!(admit(&mut usage, &[limit(9, 100)], &[vec![0]], &waiting, 9).is_empty());
    }

    #[test]
    fn a_lane_without_room_does_not_hold_up_another() {
        let mut usage = [Usage { running: 1, tokens: 0 }, Usage::default()];
        let waiting = [Candidate { lane: 0, tokens: Some(1) }, Candidate { lane: 1, tokens: Some(1) }];
        assert_eq!(admit(&mut usage, &[limit(1, 100), limit(1, 100)], &[vec![0], vec![1]], &waiting, 9), [1]);
    }

    #[test]
    fn a_task_waiting_for_a_narrow_limit_holds_no_slot_of_the_wide_one() {
        let mut usage = [Usage { running: 1, tokens: 0 }, Usage::default()];
        let waiting = [Candidate { lane: 0, tokens: None }];
        let narrow = Limit { max_running: Some(1), ..Limit::default() };
        let wide = Limit { max_running: Some(100), ..Limit::default() };
        assert!(admit(&mut usage, &[narrow, wide], &[vec![0, 1]], &waiting, 9).is_empty());
        assert_eq!(usage[1], Usage::default());
    }

    proptest! {
        #[test]
        fn admission_never_passes_a_limit_and_costs_exactly_what_it_admits(
            limits in prop::collection::vec((1i64..6, 1i64..200), 1..4),
            tasks in prop::collection::vec((0usize..4, prop::option::of(0i64..150)), 0..30),
            max in 0usize..20,
        ) {
            let limits: Vec<Limit> = limits.into_iter().map(|(running, tokens)| limit(running, tokens)).collect();
            let lanes: Vec<Vec<usize>> = (0..4usize).map(|lane| (0..limits.len()).filter(|budget| lane >> budget & 1 == 1).collect()).collect();
            let waiting: Vec<Candidate> = tasks.into_iter().map(|(lane, tokens)| Candidate { lane, tokens }).collect();
            let mut usage = vec![Usage::default(); limits.len()];
            let admitted = admit(&mut usage, &limits, &lanes, &waiting, max);
            prop_assert!(admitted.len() <= max);
            for (budget, limit) in limits.iter().enumerate() {
                prop_assert!(limit.holds(usage[budget]));
                let sum = admitted.iter().map(|at| &waiting[*at]).filter(|task| lanes[task.lane].contains(&budget))
                    .fold(Usage::default(), |sum, task| sum.plus(limit.cost(task.tokens)));
                prop_assert_eq!(sum, usage[budget]);
            }
            for lane in 0..4 {
                let taken: Vec<bool> = waiting.iter().enumerate().filter(|(_, task)| task.lane == lane).map(|(at, _)| admitted.contains(&at)).collect();
                prop_assert!(taken.windows(2).all(|pair| pair[0] || !pair[1]), "a task overtook another of its lane");
            }
        }
    }
}
