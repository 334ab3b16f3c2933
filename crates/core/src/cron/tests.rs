//! Slots against a naive enumerator that asks the clock of the zone minute by minute, and firing against clocks that are set by hours either way.

use super::*;
use jiff::Span;
use proptest::prelude::*;
use std::collections::HashSet;

const ZONES: [&str; 12] = [
    "UTC",
    "Europe/Berlin",
    "Europe/London",
    "America/New_York",
    "America/St_Johns",    // sets its clock at one minute past midnight until 2011
    "America/Sao_Paulo",   // skips midnight
    "Australia/Lord_Howe", // half an hour
    "Antarctica/Troll",    // two hours
    "Asia/Kathmandu",      // a quarter off, never set
    "Asia/Tehran",
    "Africa/Casablanca", // four changes a year
    "Pacific/Apia",      // skipped 30 December 2011
];

/// One field of a cron text with the values it means, worked out without the parser.
#[derive(Clone, Debug)]
struct Field {
    text: String,
    values: HashSet<i8>,
    star: bool,
}

fn field(least: i8, most: i8) -> impl Strategy<Value = Field> {
    let values = move |from: i8, to: i8, step: i8| (from..=to).step_by(step as usize).collect::<HashSet<i8>>();
    prop_oneof![
        2 => Just(Field { text: "*".into(), values: values(least, most, 1), star: true }),
        1 => (2i8..=20).prop_map(move |step| Field { text: format!("*/{step}"), values: values(least, most, step), star: false }),
        3 => prop::collection::hash_set(least..=most, 1..4).prop_map(|values| {
            let text = values.iter().map(i8::to_string).collect::<Vec<_>>().join(",");
            Field { text, values, star: false }
        }),
        1 => (least..=most, least..=most, 1i8..=5).prop_map(move |(a, b, step)| {
            let (from, to) = (a.min(b), a.max(b));
            Field { text: format!("{from}-{to}/{step}"), values: values(from, to, step), star: false }
        }),
    ]
}

#[derive(Clone, Debug)]
struct Text {
    minute: Field,
    hour: Field,
    day: Field,
    month: Field,
    weekday: Field,
}

fn text() -> impl Strategy<Value = Text> {
    let rarely_narrow =
        |least, most| prop_oneof![3 => Just(Field { text: "*".into(), values: (least..=most).collect(), star: true }), 1 => field(least, most)];
    // Clocks are set at night.
    let night = prop::collection::hash_set(0i8..=4, 1..4).prop_map(|values| {
        let text = values.iter().map(i8::to_string).collect::<Vec<_>>().join(",");
        Field { text, values, star: false }
    });
    (field(0, 59), prop_oneof![field(0, 23), night], rarely_narrow(1, 31), rarely_narrow(1, 12), rarely_narrow(0, 6))
        .prop_map(|(minute, hour, day, month, weekday)| Text { minute, hour, day, month, weekday })
}

impl Text {
    fn cron(&self, zone: &str) -> Option<Cron> {
        let text = [&self.minute, &self.hour, &self.day, &self.month, &self.weekday].map(|field| field.text.as_str()).join(" ");
        match Cron::new(&text, zone) {
            Ok(cron) => Some(cron),
            Err(Fault::Never) => None, // 31 February
            Err(fault) => panic!("{text}: {fault:?}"),
        }
    }

    fn matches(&self, local: DateTime) -> bool {
        let day = self.day.values.contains(&local.day());
        let weekday = self.weekday.values.contains(&local.weekday().to_sunday_zero_offset());
        let both = if self.day.star || self.weekday.star { day && weekday } else { day || weekday };
        both && self.minute.values.contains(&local.minute()) && self.hour.values.contains(&local.hour()) && self.month.values.contains(&local.month())
    }

    /// Every slot in (from, to], by looking at the zone's clock once a minute.
    fn slots(&self, zone: &TimeZone, from: i64, to: i64) -> Vec<i64> {
        let every_hour = self.hour.values.len() == 24;
        let minute = Span::new().minutes(1);
        let mut shown = HashSet::new();
        let mut before: Option<DateTime> = None;
        let mut slots = Vec::new();
        let look_from = (from - 26 * 3600).div_euclid(60) * 60;
        for at in (look_from..=to).step_by(60) {
            let local = zone.to_datetime(Timestamp::from_second(at).unwrap());
            let repeated = !shown.insert(local);
            let skipped_match = || {
                let mut skipped = before.map_or(local, |before| before.checked_add(minute).unwrap());
                while skipped < local {
                    if self.matches(skipped) {
                        return true;
                    }
                    skipped = skipped.checked_add(minute).unwrap();
                }
                false
            };
            let fires = if every_hour { self.matches(local) } else { self.matches(local) && !repeated || skipped_match() };
            if fires && at > from {
                slots.push(at);
            }
            before = Some(local);
        }
        slots
    }
}

fn walk(cron: &Cron, from: i64, to: i64) -> Vec<i64> {
    std::iter::successors(cron.next(from), |slot| cron.next(*slot)).take_while(|slot| *slot <= to).collect()
}

fn second(text: &str) -> i64 {
    text.parse::<Timestamp>().unwrap().as_second()
}

fn first(text: &str, zone: &str, after: &str, count: usize) -> Vec<String> {
    let cron = Cron::new(text, zone).unwrap();
    let slots = std::iter::successors(cron.next(second(after)), |slot| cron.next(*slot));
    slots.take(count).map(|slot| Timestamp::from_second(slot).unwrap().to_string()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn slots_are_those_a_minute_by_minute_look_finds_where_the_clock_is_set(
        text in text(), zone in 0usize..ZONES.len(), year in 1995i64..2037, change in 0usize..4, lead in 0i64..(3 * 86_400), odd in 0i64..60,
    ) {
        let zone = ZONES[zone];
        let Some(cron) = text.cron(zone) else { return Ok(()) };
        let zone = TimeZone::get(zone).unwrap();
        let new_year = Timestamp::from_second((year - 1970) * 31_556_952).unwrap();
        let set = zone.following(new_year).nth(change).map_or(new_year, |change| change.timestamp()).as_second();
        let (from, to) = (set - lead - odd, set + 3 * 86_400);
        prop_assert_eq!(walk(&cron, from, to), text.slots(&zone, from, to));
    }

    #[test]
    fn slots_are_those_a_minute_by_minute_look_finds_around_leap_days(text in text(), zone in 0usize..ZONES.len(), year in prop::sample::select(&[1999, 2000, 2023, 2024, 2099, 2100, 2104])) {
        let Some(cron) = text.cron(ZONES[zone]) else { return Ok(()) };
        let from = second(&format!("{year}-02-27T00:00:00Z"));
        let (zone, to) = (TimeZone::get(ZONES[zone]).unwrap(), from + 4 * 86_400);
        prop_assert_eq!(walk(&cron, from, to), text.slots(&zone, from, to));
    }

    #[test]
    fn from_any_instant_the_next_slot_is_the_first_of_all_that_follow(text in text(), zone in 0usize..ZONES.len(), steps in prop::collection::vec(0i64..7200, 40)) {
        let Some(cron) = text.cron(ZONES[zone]) else { return Ok(()) };
        let zone = TimeZone::get(ZONES[zone]).unwrap();
        let set = zone.following(Timestamp::from_second(1_600_000_000).unwrap()).next().map_or(1_600_000_000, |change| change.timestamp().as_second());
        let from = set - 40 * 3600;
        let slots = text.slots(&zone, from, from + 90 * 3600);
        let mut at = from;
        for step in steps {
            at += step;
            let expected = slots.iter().copied().find(|slot| *slot > at);
            prop_assert_eq!(cron.next(at).filter(|slot| *slot <= from + 90 * 3600), expected);
        }
    }

    #[test]
    fn no_slot_fires_twice_and_the_policy_holds_when_the_clock_is_set_by_hours(
        text in text(), zone in 0usize..ZONES.len(),
        steps in prop::collection::vec(prop_oneof![6 => 1i64..90, 1 => 90i64..40_000, 1 => -40_000i64..0], 1..120),
        catch_up in prop::sample::select(&[CatchUp::None, CatchUp::Last, CatchUp::All]),
    ) {
        let Some(cron) = text.cron(ZONES[zone]) else { return Ok(()) };
        let since = second("2024-03-30T22:59:30Z");
        let (mut clock, mut last, mut latest) = (since, since, since);
        let (mut fired, mut in_time) = (Vec::new(), HashSet::new());
        for step in steps {
            clock += step;
            let asked = fired.len();
            while let Some(slot) = cron.due(last, clock, catch_up) {
                prop_assert!(slot > last && slot <= clock);
                last = slot;
                fired.push(slot);
            }
            prop_assert!(catch_up != CatchUp::Last || fired.len() <= asked + 1);
            latest = latest.max(clock);
            in_time.extend(walk(&cron, since.max(clock - GRACE), clock));
        }
        prop_assert!(fired.is_sorted_by(|a, b| a < b));
        let all = walk(&cron, since, latest);
        prop_assert!(fired.iter().all(|slot| all.contains(slot)));
        match catch_up {
            CatchUp::All => prop_assert_eq!(fired, all),
            CatchUp::Last => prop_assert_eq!(fired.last(), all.last()),
            CatchUp::None => prop_assert!(fired.iter().all(|slot| in_time.contains(slot)) && fired.last() == in_time.iter().max()),
        }
    }
}

#[test]
fn a_time_the_clock_skips_fires_at_the_first_instant_after() {
    assert_eq!(first("30 2 * * *", "Europe/Berlin", "2024-03-30T12:00:00Z", 2), ["2024-03-31T01:00:00Z", "2024-04-01T00:30:00Z"]);
    assert_eq!(first("*/15 2 * * *", "Europe/Berlin", "2024-03-31T00:00:00Z", 2), ["2024-03-31T01:00:00Z", "2024-04-01T00:00:00Z"]);
    assert_eq!(first("0 9 30 12 *", "Pacific/Apia", "2011-12-29T00:00:00Z", 2), ["2011-12-30T10:00:00Z", "2012-12-29T19:00:00Z"]);
    assert_eq!(first("10 2 * * *", "Australia/Lord_Howe", "2024-10-05T14:00:00Z", 1), ["2024-10-05T15:30:00Z"]);
}

#[test]
fn a_time_the_clock_shows_twice_fires_the_first_time_unless_every_hour_is_meant() {
    assert_eq!(first("30 2 * * *", "Europe/Berlin", "2024-10-26T12:00:00Z", 2), ["2024-10-27T00:30:00Z", "2024-10-28T01:30:00Z"]);
    let hourly = ["2024-10-27T00:30:00Z", "2024-10-27T01:30:00Z", "2024-10-27T02:30:00Z"];
    assert_eq!(first("30 * * * *", "Europe/Berlin", "2024-10-27T00:00:00Z", 3), hourly);
    let half_hours = ["2024-04-06T14:45:00Z", "2024-04-06T15:15:00Z", "2024-04-06T16:15:00Z"];
    assert_eq!(first("45 * * * *", "Australia/Lord_Howe", "2024-04-06T14:30:00Z", 3), half_hours);
}

#[test]
fn leap_days_are_found_over_a_century_without_one() {
    assert_eq!(first("0 0 29 2 *", "UTC", "2096-03-01T00:00:00Z", 1), ["2104-02-29T00:00:00Z"]);
    assert_eq!(first("0 0 29 2 +MON", "UTC", "2072-03-01T00:00:00Z", 1), ["2112-02-29T00:00:00Z"]);
    assert_eq!(first("0 0 L * *", "UTC", "2023-02-01T00:00:00Z", 1), ["2023-02-28T00:00:00Z"]);
}

#[test]
fn what_is_no_schedule_is_refused() {
    for text in ["", "*", "* * * *", "0 * * * * *", "60 * * * *", "* 24 * * *", "x * * * *", "@reboot", "*/0 * * * *"] {
        assert!(matches!(Cron::new(text, "UTC"), Err(Fault::Text(_))), "{text}");
    }
    assert!(matches!(Cron::new("0 0 30 2 *", "UTC"), Err(Fault::Never)));
    assert!(matches!(Cron::new("@daily", "Europe/Berlni"), Err(Fault::Zone(Some(near))) if near == "Europe/Berlin"));
    assert!(matches!(Cron::new("@daily", ""), Err(Fault::Zone(_))));
    assert_eq!(Cron::new("@daily", "europe/berlin").unwrap().zone_name(), Some("Europe/Berlin"));
}
