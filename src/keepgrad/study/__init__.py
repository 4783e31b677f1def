"""Answers the design questions of the paper for the user's own model and images.

| file       | what it is for                                                                                  |
| ---        | ---                                                                                             |
| config     | the settings of a study                                                                         |
| questions  | the questions: six sweeps over settings of `keepgrad.apply`                                     |
| subject    | the model and its data: measures one setting, and runs short trainings with it                  |
| results    | the results so far for each setting, kept in one file; the CSV files                            |
| run        | runs a whole study, from the first setting to the report                                        |
| findings   | the conclusions: the Pareto front, the recommendation, an answer to each question               |
| figures    | the pictures                                                                                    |
| page       | the report as one HTML file                                                                     |
"""
